// The remote tier: sealed pages in a Redis.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/clock.h"
#include "cache_service/tier/lower_tier.h"
#include "cache_service/tier/redis_tls.h"

namespace heavywater {

struct RemoteTierOptions {
  std::string address;      // HOST:PORT
  std::string store_id;     // in front of every key: stores that share a Redis do not meet
  int64_t total_bytes = 0;  // of this store's pages
  absl::Duration timeout = absl::Seconds(1);  // of one exchange
  // What this process does not erase, since it was killed or the Redis was away,
  // expires. Above the longest lease: pages are not renewed.
  absl::Duration ttl = absl::Hours(24);
  // Who the store is there, and TLS (redis_connection.h).
  std::string username = {};
  std::string password_file = {};
  RedisTlsOptions tls = {};
};

// INVALID_ARGUMENT naming the field or file. The Redis need not be there: calls are UNAVAILABLE
// until it is, most of them without a try. The clock, of which only differences are
// used, must outlive it.
absl::StatusOr<std::unique_ptr<LowerTier>> OpenRemoteTier(const RemoteTierOptions& options,
                                                          Clock& clock);

// What OpenRemoteTier() makes of an address.
struct RedisAddress {
  std::string host;
  int port = 0;
};
absl::StatusOr<RedisAddress> ParseRedisAddress(const std::string& address);

}  // namespace heavywater
