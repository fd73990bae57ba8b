// AdminService: figures and configuration for operators.
#pragma once

#include <string>

#include "absl/time/time.h"
#include "cache_service/base/clock.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/blob_store.h"
#include "cache_service/tier/page_store.h"
#include "heavywater/v1/admin.grpc.pb.h"

namespace heavywater {

// Thread safe.
v1::StatsResponse CollectStats(Registry& registry, const PageStore& store, const BlobStore& blobs);

class AdminService final : public v1::AdminService::CallbackService {
 public:
  // The others must outlive it. `config_yaml` is the configuration in effect.
  AdminService(Registry& registry, const PageStore& store, const BlobStore& blobs, Clock& clock,
               std::string config_yaml);

  grpc::ServerUnaryReactor* Stats(grpc::CallbackServerContext* context,
                                  const v1::StatsRequest* request,
                                  v1::StatsResponse* response) override;
  grpc::ServerUnaryReactor* GetConfig(grpc::CallbackServerContext* context,
                                      const v1::GetConfigRequest* request,
                                      v1::GetConfigResponse* response) override;

 private:
  Registry& registry_;
  const PageStore& store_;
  const BlobStore& blobs_;
  Clock& clock_;
  const std::string config_yaml_;
  const absl::Time start_;
};

}  // namespace heavywater
