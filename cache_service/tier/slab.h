// The host tier's memory: one shared object that ranks on the same node map
// (SlabView) and fill directly. This is the owner's side; it alone allocates.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/tier/range_allocator.h"
#include "cache_service/tier/shared_memory.h"
#include "cache_service/tier/slab_format.h"

namespace heavywater {

// Not thread safe, except for At() and Watermark() on allocated ranges. Offsets
// are bytes from the front of the object, the same in every process. At all
// times free_bytes() + used_bytes() == total_bytes().
class Slab {
 public:
  // `bytes` of pages, rounded up to a unit; the header comes on top. An empty
  // name makes a slab that no other process can map.
  static absl::StatusOr<std::unique_ptr<Slab>> Create(const std::string& name, int64_t bytes);

  // The slab that an owner which has gone had kept (Keep()); nothing is allocated in it
  // until Take(). NOT_FOUND; UNAVAILABLE: it has an owner; DATA_LOSS naming what
  // differs: it is another one.
  static absl::StatusOr<std::unique_ptr<Slab>> Adopt(const std::string& name, int64_t object_bytes,
                                                     uint64_t nonce);
  // The object outlives this process, for whoever takes it over.
  void Keep();

  // What Allocate() once gave. DATA_LOSS: it cannot have, or is taken.
  absl::Status Take(int64_t offset, int64_t bytes);

  // Offset of `bytes` (rounded up to units). RESOURCE_EXHAUSTED naming need,
  // free and limit.
  absl::StatusOr<int64_t> Allocate(int64_t bytes);
  void Free(int64_t offset, int64_t bytes);

  std::byte* At(int64_t offset) { return memory_->data() + offset; }
  std::atomic<int64_t>& Watermark(int64_t offset) {
    return *reinterpret_cast<std::atomic<int64_t>*>(At(offset));
  }

  // How many changes of its owner's state belong to what lies here.
  std::atomic<uint64_t>& state_changes() { return header().state_changes; }

  const std::string& name() const { return memory_->name(); }
  uint64_t nonce() const { return nonce_; }
  int64_t object_bytes() const { return memory_->bytes(); }  // header included
  int64_t total_bytes() const { return units_.total_units() * kSlabUnitBytes; }
  int64_t free_bytes() const { return units_.free_units() * kSlabUnitBytes; }
  int64_t used_bytes() const { return units_.used_units() * kSlabUnitBytes; }

  // What Allocate(bytes) takes.
  static int64_t RoundUp(int64_t bytes);

 private:
  Slab(std::unique_ptr<SharedMemory> memory, uint64_t nonce);
  absl::Status CommitUpTo(int64_t end);
  SlabHeader& header() { return *reinterpret_cast<SlabHeader*>(At(0)); }

  std::unique_ptr<SharedMemory> memory_;
  const uint64_t nonce_;
  RangeAllocator units_;
  int64_t committed_bytes_ = 0;  // taken from the system so far
};

}  // namespace heavywater
