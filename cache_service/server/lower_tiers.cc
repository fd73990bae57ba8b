#include "cache_service/server/lower_tiers.h"

#include <utility>

#include "cache_service/base/status.h"
#ifdef HEAVYWATER_DISK_TIER
#include "cache_service/tier/disk_tier.h"
#endif
#ifdef HEAVYWATER_REMOTE_TIER
#include "cache_service/tier/remote_tier.h"
#endif

namespace heavywater {
namespace {

absl::StatusOr<std::unique_ptr<LowerTier>> OpenDisk(const v1::CacheConfig& config,
                                                    const DurableState& state) {
#ifdef HEAVYWATER_DISK_TIER
  return OpenDiskTier({.path = config.disk_path(),
                       .total_bytes = config.disk_bytes(),
                       .keeps = state.store != nullptr,
                       .restores = state.restores});
#else
  return absl::InvalidArgumentError("disk_path: this build has no disk tier (RocksDB)");
#endif
}

absl::StatusOr<std::unique_ptr<LowerTier>> OpenRemote(const v1::CacheConfig& config,
                                                      const DurableState& state, Clock& clock) {
#ifdef HEAVYWATER_REMOTE_TIER
  return OpenRemoteTier({.address = config.redis_address(),
                         .store_id = state.redis_store_id,
                         .total_bytes = config.redis_bytes(),
                         .timeout = absl::Milliseconds(config.redis_timeout_ms()),
                         .ttl = absl::Milliseconds(config.redis_ttl_ms()),
                         .username = config.redis_username(),
                         .password_file = config.redis_password_file(),
                         .tls = {.ca_file = config.redis_ca_file(),
                                 .server_name = config.redis_server_name(),
                                 .cert_file = config.redis_cert_file(),
                                 .key_file = config.redis_key_file()}},
                        clock);
#else
  return absl::InvalidArgumentError("redis_address: this build has no remote tier (hiredis)");
#endif
}

}  // namespace

absl::StatusOr<std::vector<std::unique_ptr<LowerTier>>> OpenLowerTiers(
    const v1::CacheConfig& config, const DurableState& state, Clock& clock) {
  std::vector<std::unique_ptr<LowerTier>> tiers;
  if (!config.disk_path().empty()) {
    HW_ASSIGN_OR_RETURN(auto disk, OpenDisk(config, state));
    tiers.push_back(std::move(disk));
  }
  if (!config.redis_address().empty()) {
    HW_ASSIGN_OR_RETURN(auto remote, OpenRemote(config, state, clock));
    tiers.push_back(std::move(remote));
  }
  return tiers;
}

}  // namespace heavywater
