// Limits of the registry. Plain, converted from CacheConfig by the server.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>

#include "absl/time/time.h"
#include "cache_service/tier/tenant_book.h"

namespace heavywater {

struct RegistryOptions {
  int64_t max_sequences = 10000;
  int64_t max_groups = 64;
  // Of committed states to go on from, of all sequences together: beyond it the oldest
  // are dropped, and their sequences are computed again after a failure.
  int64_t max_snapshot_bytes = int64_t{1} << 30;
  // Whole pages of prompts that others can be found to begin with, of all sequences: beyond it
  // the oldest are not found.
  int64_t max_prefix_pages = int64_t{1} << 20;
  absl::Duration sequence_lease = absl::Seconds(60);  // where Open gives none
  absl::Duration rank_lease = absl::Seconds(5);
  absl::Duration suspend_ttl = absl::Hours(1);  // at most, and where Suspend gives none
  // Of host memory that suspended and pinned sequences may hold: they make no room for others.
  int64_t max_suspended_bytes = std::numeric_limits<int64_t>::max();
  int64_t max_pins = 1024;
  TenantLimits tenant_defaults = {};  // of tenants that have no quota of their own
  // Numbers go up from here. The server begins at its start time, so that no id
  // or epoch of an earlier run comes again.
  uint64_t first_sequence_id = 1;
  // Ids are those that leave `id_slot` when divided by `id_stride`: services that share
  // sequences have a slot each.
  uint64_t id_slot = 0;
  uint64_t id_stride = 1;
  // Told, under a lock, of each sequence that others should hear of: that it began, was
  // suspended, goes on, ended. Null: nobody.
  std::function<void(uint64_t sequence)> on_change = nullptr;
  uint64_t first_epoch = 1;

  // What a write that is under way when its rank's time is over has to end.
  absl::Duration write_grace() const { return std::max(rank_lease, absl::Seconds(1)); }
};

// Bounds of single requests.
inline constexpr int kMaxRanks = 256;
inline constexpr size_t kMaxNameBytes = 128;
inline constexpr size_t kMaxDigestBytes = 16384;
inline constexpr int64_t kMaxJoinTimeoutMs = 600'000;
inline constexpr int64_t kDefaultJoinTimeoutMs = 30'000;
inline constexpr int64_t kMaxLeaseMs = 24 * 3600 * 1000;

inline constexpr int64_t kMaxQuotaBytes = int64_t{1} << 50;
inline constexpr int64_t kMaxQuotaSequences = 10'000'000;

// Of the key-value store of one group.
inline constexpr size_t kMaxKeyBytes = 256;
inline constexpr size_t kMaxValueBytes = 64 * 1024;
inline constexpr size_t kMaxKeys = 4096;
inline constexpr size_t kMaxBoardBytes = 16 << 20;
inline constexpr size_t kMaxWaiters = 4096;

}  // namespace heavywater
