// What AdminService.Stats and Watch show.
#pragma once

#include "cache_service/registry/registry.h"
#include "cache_service/server/drainer.h"
#include "cache_service/tier/blob_store.h"
#include "cache_service/tier/page_store.h"
#include "heavywater/v1/admin.pb.h"

namespace heavywater {

// Thread safe. All must outlive it.
class AdminStats {
 public:
  AdminStats(Registry& registry, PageStore& store, const BlobStore& blobs, const Drainer& drainer,
             Clock& clock)
      : registry_(registry),
        store_(store),
        blobs_(blobs),
        drainer_(drainer),
        clock_(clock),
        start_(clock.Now()) {}

  v1::StatsResponse Collect() const;

 private:
  void AddTenants(v1::StatsResponse* response) const;

  Registry& registry_;
  PageStore& store_;
  const BlobStore& blobs_;
  const Drainer& drainer_;
  Clock& clock_;
  const absl::Time start_;
};

}  // namespace heavywater
