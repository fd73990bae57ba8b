// A tier below host memory: sealed pages by key, as bytes. What it holds is told to
// it and asked from it whole, page by page; the order of tiers, and which page lies
// in which, is OrderedPageStore's. Conformance tests in tests/cache_service/tier run
// on every implementation.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/ids.h"

namespace heavywater {

// A page has one key in all tiers. Layers and heads are below 1024.
struct PageKey {
  SequenceId sequence = 0;
  FingerprintId fingerprint = 0;  // one for all pages of a sequence
  int layer = 0;
  int kv_head = 0;
  int64_t page = 0;

  bool operator==(const PageKey&) const = default;
};

// For messages: "page 3 of sequence 7, layer 1, kv_head 0".
std::string Describe(const PageKey& key);

// A sealed page on its way down.
struct PageCopy {
  PageKey key;
  std::span<const std::byte> bytes;
  uint32_t crc32c = 0;  // of the bytes, from its seal
};

// One that lies in the tier already.
struct StoredPage {
  PageKey key;
  int64_t page_bytes = 0;
};

struct LowerTierStats {
  int64_t total_bytes = 0;  // free + used = total at all times
  int64_t used_bytes = 0;   // keys and headers included
  int64_t free_bytes = 0;
  int64_t pages = 0;
};

// Thread safe. Every call may wait for a disk or a network, up to the tier's own
// time-out: never make one under a lock.
class LowerTier {
 public:
  virtual ~LowerTier() = default;

  virtual const char* name() const = 0;  // in statistics: "disk", "remote"

  // Stores pages; one status for each, in their order. OK: Get() returns the page
  // from now on. A key that is there already is replaced. RESOURCE_EXHAUSTED: no
  // room, by the tier's limit or the medium's; UNAVAILABLE: not reachable, or not
  // writable now; INVALID_ARGUMENT: an impossible key, or a second fingerprint of one
  // sequence.
  virtual std::vector<absl::Status> Put(std::span<const PageCopy> pages) = 0;

  // The page's own bytes, checked, into a buffer of exactly their number; their
  // CRC32C. NOT_FOUND: not here (any more); DATA_LOSS: here, but not as it was
  // stored; UNAVAILABLE.
  virtual absl::StatusOr<uint32_t> Get(const PageKey& key, std::span<std::byte> bytes) = 0;

  // Keys that are not there are no error. UNAVAILABLE: some may still be there, and
  // count as used.
  virtual absl::Status Erase(std::span<const PageKey> keys) = 0;
  virtual absl::Status EraseSequence(SequenceId sequence) = 0;

  // After a restart, before anything else: the pages that an earlier process has stored
  // and that somebody may still ask for; what else it left is erased, or expires.
  // RESOURCE_EXHAUSTED: they exceed the limit.
  virtual absl::Status Restore(std::span<const StoredPage> pages) = 0;

  virtual LowerTierStats Stats() const = 0;
};

}  // namespace heavywater
