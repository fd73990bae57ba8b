// What a lower tier holds: keys and bytes, against its limit.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "cache_service/base/mutex.h"
#include "cache_service/tier/lower_tier.h"

namespace heavywater {

// Thread safe. At all times free + used = total. A page counts from before it is
// stored until after it has been erased, so the medium never holds more.
class PageBook {
 public:
  // `tier` names the limit in messages.
  PageBook(const char* tier, int64_t total_bytes) : tier_(tier), total_bytes_(total_bytes) {}

  // Room for the page; false when it is there already (then nothing is taken).
  // RESOURCE_EXHAUSTED naming need, free and limit; INVALID_ARGUMENT: another
  // fingerprint than the sequence's other pages.
  absl::StatusOr<bool> Add(const PageKey& key, int64_t page_bytes);
  // Those that lie in the tier already; those that are over the limit now are left out and
  // returned. DATA_LOSS: they do not fit together.
  absl::StatusOr<std::vector<PageKey>> Restore(std::span<const StoredPage> pages);

  // No error where it is not there.
  void Remove(const PageKey& key);

  // Up to `max` of them, in no order.
  std::vector<PageKey> KeysOf(SequenceId sequence, size_t max) const;
  LowerTierStats Stats() const;

 private:
  // Layer, KV head and page in one number: a million pages are a million of these.
  using PackedKey = uint64_t;
  struct Sequence {
    FingerprintId fingerprint = 0;
    absl::flat_hash_map<PackedKey, int32_t> pages;  // their bytes: coded pages have fewer
  };
  static PackedKey Pack(const PageKey& key);

  const char* const tier_;
  const int64_t total_bytes_;
  mutable Mutex mutex_;
  absl::flat_hash_map<SequenceId, Sequence> sequences_ ABSL_GUARDED_BY(mutex_);
  int64_t used_bytes_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t pages_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace heavywater
