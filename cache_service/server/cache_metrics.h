// Prometheus families of the cache service, taken from the registry and the page
// store when they are scraped: there is no second set of counters.
#pragma once

#include <prometheus/collectable.h>

#include <vector>

#include "cache_service/registry/registry.h"
#include "cache_service/server/drain_gate.h"
#include "cache_service/tier/blob_store.h"
#include "cache_service/tier/page_store.h"
#include "cache_service/tier/state_store.h"

namespace heavywater {

// Thread safe.
class CacheMetrics final : public prometheus::Collectable {
 public:
  // All must outlive it. `state`: null without state_dir.
  CacheMetrics(Registry& registry, PageStore& store, const BlobStore& blobs, const DrainGate& gate,
               const StateStore* state)
      : registry_(registry), store_(store), blobs_(blobs), gate_(gate), state_(state) {}

  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  Registry& registry_;
  PageStore& store_;
  const BlobStore& blobs_;
  const DrainGate& gate_;
  const StateStore* const state_;
};

}  // namespace heavywater
