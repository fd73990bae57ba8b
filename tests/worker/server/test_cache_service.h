// A real cache service in this process that tests stop and start again.
#pragma once

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cache_service/base/clock.h"
#include "cache_service/base/ids.h"
#include "cache_service/server/cache_server.h"
#include "heavywater/v1/config.pb.h"
#include "heavywater/v1/page_store.grpc.pb.h"
#include "heavywater/v1/sequence.grpc.pb.h"
#include "worker/server/stop_flag.h"

namespace heavywater {

class TestCacheService {
 public:
  // `clock` measures leases.
  explicit TestCacheService(Clock& clock = Clock::Real());
  ~TestCacheService() { Stop(); }

  // At the address it had, if it ran before.
  void Start();
  // Ends at once; what it knew is lost.
  void Stop();
  v1::CacheConfig& config() { return config_; }
  const std::string& address() const { return config_.listen_address(); }

  absl::StatusOr<v1::Sequence> Get(SequenceId sequence);
  // As of `plan`; waits for the reports behind the step.
  std::vector<v1::SequenceSet> SetsAt(SequenceId sequence, int64_t plan);
  absl::StatusOr<std::string> ReadRow(SequenceId sequence, int layer, int kv_head,
                                      int64_t position);
  absl::Status Close(SequenceId sequence);
  std::shared_ptr<grpc::Channel> Channel() const;

 private:
  Clock& clock_;

  v1::CacheConfig config_;
  std::unique_ptr<CacheServer> server_;
  std::unique_ptr<StopFlag> stop_;
  std::thread ticker_;
};

}  // namespace heavywater
