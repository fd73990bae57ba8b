// The host tier of the cache service: pages in a slab.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "cache_service/base/mutex.h"
#include "cache_service/tier/page_store.h"
#include "cache_service/tier/sequence_pages.h"
#include "cache_service/tier/slab.h"

namespace heavywater {

// Thread safe. Reads and writes hold only their own sequence's mutex, so that
// copies of different sequences run side by side.
class HostPageStore final : public PageStore {
 public:
  explicit HostPageStore(std::unique_ptr<Slab> slab);

  absl::Status Open(const SequenceSpec& spec) override;
  absl::StatusOr<Reservation> Reserve(const PageRange& range, bool direct) override;
  absl::Status Write(int rank, const RowRange& rows, std::span<const std::byte> bytes) override;
  absl::Status Commit(SequenceId sequence, int rank, int64_t tokens) override;
  absl::StatusOr<int64_t> Abort(SequenceId sequence, int rank) override;
  absl::StatusOr<int64_t> Skip(SequenceId sequence, int rank, int64_t first_page,
                               int64_t num_pages) override;
  absl::Status Read(const RowRange& rows, std::span<std::byte> bytes) override;
  absl::Status Release(SequenceId sequence) override;
  void StopWriter(SequenceId sequence, int rank) override;
  int64_t Watermark(SequenceId sequence, int rank) const override;
  bool IsWriter(SequenceId sequence, int rank) const override;
  int64_t SequenceBytes(SequenceId sequence) const override;
  PageStoreStats Stats() const override;

  // What ranks need to map it; the name is empty when they cannot.
  const Slab& slab() const { return *slab_; }

 private:
  struct Entry {
    Entry(const SequenceSpec& spec, int64_t watermarks_offset, Slab& slab)
        : pages(spec, watermarks_offset, slab) {}

    mutable Mutex mutex;  // taken before the store's, never after
    SequencePages pages ABSL_GUARDED_BY(mutex);
    bool released ABSL_GUARDED_BY(mutex) = false;
    // Guarded by the store's mutex:
    int64_t promised_bytes = 0;  // of free room, for what the prompt still needs
    int64_t retiring_bytes = 0;  // of used room, while in retiring_
  };
  using EntryPtr = std::shared_ptr<Entry>;

  absl::StatusOr<EntryPtr> Find(SequenceId sequence) const;
  // RESOURCE_EXHAUSTED, counted. `own_promise` of the held room may be used.
  absl::Status CheckRoom(int64_t need, int64_t own_promise) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `count` places of `bytes` each, or none.
  absl::StatusOr<std::vector<int64_t>> Allocate(int64_t count, int64_t bytes, int64_t own_promise)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Promise(Entry& entry, int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Gives the memory of pages back that are the entry's no more; how many.
  int64_t FreePages(Entry& entry, std::span<const int64_t> offsets)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);
  // Gives the memory of a released sequence back.
  void FreeAll(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);

  const std::unique_ptr<Slab> slab_;
  mutable Mutex mutex_;  // guards the slab's allocator, too
  absl::flat_hash_map<SequenceId, EntryPtr> sequences_ ABSL_GUARDED_BY(mutex_);
  // Released while a rank may still be writing into the pages.
  absl::flat_hash_map<SequenceId, EntryPtr> retiring_ ABSL_GUARDED_BY(mutex_);
  PageStoreStats counters_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
