// What operators do at the cache service: AdminService, with the names of the Python client.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/security/channels.h"
#include "client/cpp/read_retry.h"
#include "heavywater/v1/admin.grpc.pb.h"

namespace heavywater {

// Threads may share one. Reads are repeated while the service is UNAVAILABLE; mutations, each of
// which gets a request id where it has none, are not.
class AdminClient {
 public:
  using Stub = v1::AdminService::StubInterface;

  // Connects lazily. `timeout` bounds every call, beyond what a drain itself may wait. `security`:
  // TLS, and the token, which is an admin's.
  static absl::StatusOr<std::unique_ptr<AdminClient>> Connect(
      const std::string& cache_address,
      std::chrono::milliseconds timeout = std::chrono::milliseconds(30'000),
      const ChannelSecurity& security = {});
  // With a stub of the caller's, for tests.
  AdminClient(std::unique_ptr<Stub> stub, std::chrono::milliseconds timeout, Sleeper sleep);

  // What the service holds, tier by tier.
  absl::StatusOr<v1::StatsResponse> Stats();
  // The configuration in effect, as YAML.
  absl::StatusOr<std::string> GetConfig();
  // How much a tenant may hold; 0 is no limit. What it holds already stays.
  absl::StatusOr<v1::TenantStats> SetQuota(const v1::SetQuotaRequest& request);
  // Until then the sequence's pages stay in their tier and nothing but its close ends it. The
  // owner's pin of before is replaced. NOT_FOUND, RESOURCE_EXHAUSTED.
  absl::StatusOr<v1::PinResponse> Pin(uint64_t sequence_id, const std::string& owner,
                                      int64_t ttl_ms);
  // The owner's pin ends now. NOT_FOUND: there is none.
  absl::StatusOr<v1::PinResponse> Unpin(uint64_t sequence_id, const std::string& owner);
  // The service takes no new sequences; waits until none runs, or `deadline_ms` (0: a minute) is
  // over. `suspend`: those that run are suspended, as soon as they have a committed state.
  absl::StatusOr<v1::DrainState> Drain(int64_t deadline_ms = 0, bool suspend = false);
  // The service takes new work again.
  absl::Status UndoDrain();
  // Pages in host memory that may leave it (of one sequence; 0: of all) go to the tiers below.
  absl::StatusOr<v1::FlushResponse> Flush(
      uint64_t sequence_id = 0,
      std::chrono::milliseconds timeout = std::chrono::milliseconds(600'000));
  // What state_dir keeps is written anew, and is on the medium when this returns.
  absl::StatusOr<v1::SnapshotResponse> Snapshot();
  // Hands figures and events to `on_message` at an interval, until it returns false (OK) or the
  // service ends (UNAVAILABLE).
  absl::Status Watch(const v1::WatchRequest& request,
                     const std::function<bool(const v1::WatchResponse&)>& on_message);

 private:
  std::unique_ptr<Channels> channels_;  // of the stub, where Connect() made it
  std::unique_ptr<Stub> stub_;
  std::chrono::milliseconds timeout_;
  Sleeper sleep_;
};

}  // namespace heavywater
