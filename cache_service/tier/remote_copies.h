// Copies of whole sequences in a Redis, apart from the pages that the remote tier keeps
// there: each is one hash, so that it goes as a whole, by a call or by its time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/clock.h"
#include "cache_service/tier/lower_tier.h"
#include "cache_service/tier/redis_pool.h"

namespace heavywater {

// Thread safe. All calls wait for the network: none under a lock. UNAVAILABLE: the Redis
// cannot be reached; RESOURCE_EXHAUSTED: it is full.
class RemoteCopies {
 public:
  // `endpoint`: who asks, and how; the address says where. INVALID_ARGUMENT naming the field or
  // file. The clock must outlive it.
  static absl::StatusOr<std::unique_ptr<RemoteCopies>> Create(const std::string& address,
                                                              RedisEndpoint endpoint, Clock& clock);

  // Adds to the copy of that name, which goes `ttl` from now unless more is added. All or an
  // error: then Erase() the copy.
  absl::Status PutPages(const std::string& copy, std::span<const PageCopy> pages,
                        absl::Duration ttl);
  absl::Status PutState(const std::string& copy, std::string_view state, absl::Duration ttl);

  // Pages of equal size, one after the other into `bytes`, each checked. NOT_FOUND: the copy
  // or one of the pages is not there; DATA_LOSS: not as it was written.
  absl::Status GetPages(const std::string& copy, std::span<const PageKey> keys,
                        std::span<std::byte> bytes);
  // Likewise; its checksum is the caller's to know.
  absl::StatusOr<std::string> GetState(const std::string& copy, int64_t bytes, uint32_t crc32c);

  // OK also where there is none.
  absl::Status Erase(const std::string& copy);

 private:
  RemoteCopies(RedisEndpoint endpoint, Clock& clock) : pool_(std::move(endpoint), clock) {}

  RedisPool pool_;
};

}  // namespace heavywater
