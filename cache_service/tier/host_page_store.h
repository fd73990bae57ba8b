// The host tier of the cache service: pages in a slab.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "cache_service/base/mutex.h"
#include "cache_service/tier/page_holders.h"
#include "cache_service/tier/page_place.h"
#include "cache_service/tier/page_store.h"
#include "cache_service/tier/sequence_pages.h"
#include "cache_service/tier/slab.h"
#include "cache_service/tier/state_store.h"
#include "cache_service/tier/tenant_book.h"

namespace heavywater {

// Thread safe. Reads and writes hold only their own sequence's mutex, so that
// copies of different sequences run side by side.
class HostPageStore final : public PageStore {
 public:
  // `state`: where it keeps what a restart needs; null: nothing survives. Outlives it.
  explicit HostPageStore(std::unique_ptr<Slab> slab, StateStore* state = nullptr);

  absl::Status Open(const SequenceSpec& spec) override;
  absl::StatusOr<int64_t> OpenFrom(const SequenceSpec& spec, const PageSource& source) override;
  absl::StatusOr<int64_t> PrepareShare(SequenceId sequence, int64_t tokens, bool exact) override;
  absl::StatusOr<Reservation> Reserve(const PageRange& range, bool direct) override;
  absl::Status Write(int rank, const RowRange& rows, std::span<const std::byte> bytes) override;
  absl::Status Commit(SequenceId sequence, int rank, int64_t tokens) override;
  absl::StatusOr<int64_t> Abort(SequenceId sequence, int rank) override;
  absl::StatusOr<int64_t> Skip(SequenceId sequence, int rank, int64_t first_page,
                               int64_t num_pages) override;
  absl::Status Read(const RowRange& rows, std::span<std::byte> bytes) override;
  int TierOf(const RowRange& rows) const override;
  absl::Status Release(SequenceId sequence) override;
  void StopWriter(SequenceId sequence, int rank) override;
  // (host_page_store_contested.cc)
  absl::Status Contest(SequenceId sequence, int rank, int64_t tokens) override;
  void EndContest(SequenceId sequence) override;
  absl::Status Extend(SequenceId sequence, int64_t max_tokens) override;
  absl::Status CheckPages(SequenceId sequence) override;
  absl::Status Truncate(SequenceId sequence, int64_t tokens) override;
  absl::Status BringUp(SequenceId sequence, int64_t tokens) override;
  using PageStore::BringUp;
  absl::Status Rest(SequenceId sequence, int rank, std::span<const PageId> pages) override;
  absl::StatusOr<std::vector<absl::StatusOr<int64_t>>> Ask(SequenceId sequence, int rank,
                                                           std::span<const PageId> pages) override;
  int LowestTierOf(SequenceId sequence, std::span<const PageId> pages) const override;
  int LowestTierOf(const PageRange& range) const override;
  int64_t Watermark(SequenceId sequence, int rank) const override;
  bool IsWriter(SequenceId sequence, int rank) const override;
  bool HasWriters(SequenceId sequence) const override;
  int64_t HostBytes(SequenceId sequence) const override;
  int64_t SequenceBytes(SequenceId sequence) const override;
  int64_t HostBytesTogether(std::span<const SequenceId> sequences) const override;
  std::vector<int64_t> FreedBytes(std::span<const SequenceId> sequences) const override;
  // There is no tier below that this store knows how to reach.
  absl::Status MakeRoom(const absl::Status& full, SequenceId /*spared*/) override { return full; }
  using PageStore::MakeRoom;
  void SetPinned(SequenceId sequence, bool pinned) override;
  void SetOwner(SequenceId sequence, const std::string& tenant, PageDtype dtype) override;
  TenantBook& tenants() override { return tenants_; }
  PageStoreStats Stats() const override;

  // (OpenFrom() and PrepareShare(): host_page_store_share.cc)
  // --- For the store of tiers below --- (host_page_store_tiers.cc)
  // As Read(); the place of the page where it is not the slab.
  absl::StatusOr<std::optional<PagePlace>> ReadOrLocate(const RowRange& rows,
                                                        std::span<std::byte> bytes);
  struct Moves {
    std::vector<PagePlace> pages;  // of one sequence
    int64_t freed_bytes = 0;       // of pages that nobody can read: given back at once
  };
  // Of the sequence that was unused longest, among those with pages that may leave
  // the tier (it is not pinned, and its tenant's quota below has room): `max_bytes` of
  // them, or one page. Each is moving until Settle().
  Moves BeginMoves(int from, int64_t max_bytes, const MoveFilter& filter = {});
  absl::Status CopyOut(const PagePlace& place, std::span<std::byte> bytes);
  // The moving page has been copied to tier `to`: it lies there from now on, stored `as` that,
  // and its place in the slab, if it had one, is free (`freed` bytes are more then), or others'.
  Relocation Relocate(const PagePlace& place, int to, const StoredAs& as, int64_t* freed);
  void Settle(const PageKey& key);
  // Its bytes are lost or damaged where it lies: it is not moved again.
  void MarkStuck(const PageKey& key);
  // Puts a page back into the slab, unless it would hold more than `max_used_bytes`
  // then or the page has another place by now. It is moving until Settle().
  bool Promote(const PagePlace& place, std::span<const std::byte> bytes, int64_t max_used_bytes);
  // Whether its tenant's quota has room for `bytes` more in host memory.
  absl::Status CheckHostQuota(SequenceId sequence, int64_t bytes);
  // Of the sequence's first `tokens`; it counts as used just now. NOT_FOUND.
  absl::StatusOr<std::vector<PagePlace>> PagesBelow(SequenceId sequence, int64_t tokens);
  // --- Pages that rest --- (host_page_store_rest.cc)
  // As Ask() for one page; its place where it is not the slab.
  absl::StatusOr<SequencePages::Asked> AskOrLocate(SequenceId sequence, int rank,
                                                   const PageId& page);
  // Of the range, those below the slab. INVALID_ARGUMENT, NOT_FOUND.
  absl::StatusOr<std::vector<PagePlace>> PagesBelow(const PageRange& range) const;
  // No page of the sequence rests any more, if all its ranks have stopped.
  void StopResting(SequenceId sequence);
  int64_t PageBytes(SequenceId sequence) const;  // of one, in the slab; 0: unknown
  int64_t RestingPages() const;
  // Bytes of the slab that may leave it.
  int64_t MovableBytes() const;
  // Counted: pages asked for, and those of them that are gone.
  void NoteAsked(int64_t pages, int64_t lost);

  // As SequencePages says. NOT_FOUND.
  absl::StatusOr<std::vector<WrittenPart>> Written(SequenceId sequence) const;
  // Used and promised: what is not there for anybody else.
  int64_t TakenBytes() const;

  // --- After a restart --- (host_page_store_state.cc)
  struct Restored {
    std::vector<SequenceId> live;
    std::vector<SequenceId> retiring;  // ended, ranks may still be writing
    std::vector<PagePlace> below;      // pages that lie in other tiers
  };
  // Before anything else: takes over what the state says of the slab, which must be the
  // one that it was written for. DATA_LOSS naming what does not fit: then neither may be
  // used.
  absl::StatusOr<Restored> Restore();

  // What ranks need to map it; the name is empty when they cannot.
  const Slab& slab() const { return *slab_; }
  Slab& slab() { return *slab_; }

 private:
  struct Entry {
    // `keeps`: for a restart.
    Entry(SequencePages all_pages, bool keeps, bool is_released = false, TenantUse holds = {})
        : pages(std::move(all_pages)), released(is_released), held(holds) {
      if (keeps) pages.TrackChanges();
    }

    mutable Mutex mutex;  // taken before the store's, never after
    SequencePages pages ABSL_GUARDED_BY(mutex);
    bool released ABSL_GUARDED_BY(mutex);
    bool pinned ABSL_GUARDED_BY(mutex) = false;
    TenantUse held ABSL_GUARDED_BY(mutex);  // as its tenant's account has it
    // Guarded by the store's mutex:
    int64_t promised_bytes = 0;  // of free room, for what the prompt still needs
    int64_t retiring_bytes = 0;  // of used room: contested; all that it holds, while in retiring_
    uint64_t last_use = 0;       // by use_count_
  };
  using EntryPtr = std::shared_ptr<Entry>;

  absl::StatusOr<EntryPtr> Find(SequenceId sequence) const;
  struct Beginning {
    int64_t held_pages = 0;  // of its prompt, which others hold, too
    int64_t new_pages = 0;   // that it gets at once
    bool grows = true;       // room is held for the rest of its prompt
  };
  // `pages`: the offsets of its new ones.
  absl::StatusOr<EntryPtr> Admit(const SequenceSpec& spec, const Beginning& begins,
                                 std::vector<int64_t>* pages);
  // RESOURCE_EXHAUSTED, counted. `own_promise` of the held room may be used.
  absl::Status CheckRoom(int64_t need, int64_t own_promise) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `count` places of `bytes` each, or none.
  absl::StatusOr<std::vector<int64_t>> Allocate(int64_t count, int64_t bytes, int64_t own_promise)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Promise(Entry& entry, int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // What the prompt needs no more. Others may have it once the records say so: one that
  // was admitted into it and a restart that finds it promised would not fit together.
  void EndPromise(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);
  // Gives the memory of pages back that are the entry's no more, where nobody else holds
  // them; how many.
  int64_t FreePages(Entry& entry, std::span<const int64_t> offsets)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);
  // `taker` has just got shared pages: they have one more holder.
  void Hold(const SequencePages& taker);
  // Of all sequences, those of several once.
  int64_t CountPages() const;
  // Of a sequence, or one that has been released; null.
  EntryPtr FindAny(SequenceId sequence) const;
  // Gives what was contested back.
  void FreeContested(Entry& entry, const ContestedMemory& memory)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);
  // Of a sequence that goes on.
  void NoteContested(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);
  // Of a released one, when nobody may be writing to it any more.
  void FreeIfStopped(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);
  // Gives the memory of a released sequence back.
  void FreeAll(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);
  // Keeps what has changed: before anybody is answered, and before room that is free by
  // it can be given to others.
  void Save(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);
  // Brings the tenant's account to what the sequence holds now. (host_page_store_tenants.cc)
  void Recount(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);
  // More in host memory than is counted yet, if the tenant's quota has room for it.
  absl::Status HoldHost(Entry& entry, int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);
  void ReturnHost(Entry& entry, int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(entry.mutex);
  absl::Status LoadSequence(SequenceId id, std::string_view record, Restored* restored);
  absl::Status LoadPage(const StateId& id, std::string_view record, Restored* restored);
  // Promises only guide admission: what is not free (a rank's pages came between) is none.
  void CutPromises() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static int64_t HeldBytes(const SequencePages& pages);
  static int64_t ContestedBytes(const SequencePages& pages);
  std::vector<EntryPtr> LongestUnusedFirst() const;
  // A place for one page, unless the slab would hold more than that.
  std::optional<int64_t> AllocateWithin(int64_t bytes, int64_t max_used_bytes);

  const std::unique_ptr<Slab> slab_;
  StateStore* const state_;
  TenantBook tenants_;
  mutable Mutex mutex_;  // guards the slab's allocator, too
  absl::flat_hash_map<SequenceId, EntryPtr> sequences_ ABSL_GUARDED_BY(mutex_);
  // Released while a rank may still be writing into the pages.
  absl::flat_hash_map<SequenceId, EntryPtr> retiring_ ABSL_GUARDED_BY(mutex_);
  PageHolders holders_ ABSL_GUARDED_BY(mutex_);
  PageStoreStats counters_ ABSL_GUARDED_BY(mutex_);
  uint64_t use_count_ ABSL_GUARDED_BY(mutex_) = 0;  // time, as far as coldness needs it
};

}  // namespace heavywater
