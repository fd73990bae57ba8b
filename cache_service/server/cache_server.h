// The cache service as one object: slab, registry, services, metrics. main() and
// tests make one each.
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/clock.h"
#include "heavywater/v1/config.pb.h"

namespace grpc {
class Server;
}

namespace heavywater {

class Access;

// Thread safe, except for the destructor.
class CacheServer {
 public:
  // Binds and serves; ready when this returns. `config` as DefaultCacheConfig()
  // and the user give it. The clock decides about leases; it must outlive this.
  static absl::StatusOr<std::unique_ptr<CacheServer>> Start(const v1::CacheConfig& config,
                                                            Clock& clock = Clock::Real());
  // Drains, stops, removes the slab unless there is a state_dir: then all of it waits for
  // the next Start() of the same configuration.
  ~CacheServer();
  CacheServer(const CacheServer&) = delete;
  CacheServer& operator=(const CacheServer&) = delete;

  const std::string& address() const;
  const std::string& metrics_address() const;
  void PrintAddresses() const;

  // Ends leases and waits that are over; call it several times a second.
  void Tick();

  // Readiness off; new work is UNAVAILABLE, calls that wait for other ranks end.
  void BeginDrain();
  // BeginDrain(), waits for calls in flight up to drain_ms, cancels the rest.
  void Drain();

  grpc::Server& server();  // for in-process channels

 private:
  struct Parts;
  explicit CacheServer(std::unique_ptr<Parts> parts);
  static absl::StatusOr<std::unique_ptr<Parts>> MakeParts(const v1::CacheConfig& config,
                                                          const Access& access, Clock& clock);

  std::unique_ptr<Parts> parts_;
};

}  // namespace heavywater
