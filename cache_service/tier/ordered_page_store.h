// All tiers as one store: the host's slab, and below it those of a list, the faster
// first. Pages go down when their tier is nearly full, the coldest first, and come
// up when they are read.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/mutex.h"
#include "cache_service/tier/host_page_store.h"
#include "cache_service/tier/lower_tier.h"
#include "cache_service/tier/page_store.h"

namespace heavywater {

struct OrderedStoreOptions {
  // Of each tier but the last: above `high_percent` pages go down until no more than
  // `low_percent` are used.
  int high_percent = 90;
  int low_percent = 75;
  // One piece of work, and the memory that it takes: a page at least.
  int64_t max_move_bytes = 4 << 20;
  // A tier that has refused a page is left alone for so long; what would have gone there
  // goes to the next one below.
  absl::Duration rest = absl::Seconds(1);
  // Pages of numbers are stored at 8 bits below the host (page_coding.h), where they save room
  // by it and have no NaN: what comes up again is near to what went down, not equal.
  bool code_pages = false;
  // Told, with no lock held, when a tier begins to refuse pages (why), and when it takes
  // them again (OK). Null: nobody.
  std::function<void(const char* tier, const absl::Status& status)> on_change = nullptr;
};

// Thread safe. Only pages of sequences that all ranks have stopped writing leave the
// slab, and those that rest: the others are read in place. A page is in one tier at any time; it
// leaves one only after the next has acknowledged it. What fails changes nothing but a counter.
// While a tier below works no lock is held but those that let one thread at a time move
// pages out of a tier.
class OrderedPageStore final : public PageStore {
 public:
  // The clock must outlive it.
  OrderedPageStore(std::unique_ptr<HostPageStore> host,
                   std::vector<std::unique_ptr<LowerTier>> below, OrderedStoreOptions options,
                   Clock& clock);

  absl::Status Open(const SequenceSpec& spec) override { return host_->Open(spec); }
  absl::StatusOr<int64_t> OpenFrom(const SequenceSpec& spec, const PageSource& source) override {
    return host_->OpenFrom(spec, source);
  }
  absl::StatusOr<int64_t> PrepareShare(SequenceId sequence, int64_t tokens, bool exact) override {
    return host_->PrepareShare(sequence, tokens, exact);
  }
  absl::StatusOr<Reservation> Reserve(const PageRange& range, bool direct) override;
  absl::Status Write(int rank, const RowRange& rows, std::span<const std::byte> bytes) override {
    return host_->Write(rank, rows, bytes);
  }
  absl::Status Commit(SequenceId sequence, int rank, int64_t tokens) override {
    return host_->Commit(sequence, rank, tokens);
  }
  absl::StatusOr<int64_t> Abort(SequenceId sequence, int rank) override {
    return host_->Abort(sequence, rank);
  }
  absl::StatusOr<int64_t> Skip(SequenceId sequence, int rank, int64_t first_page,
                               int64_t num_pages) override {
    return host_->Skip(sequence, rank, first_page, num_pages);
  }
  absl::Status Read(const RowRange& rows, std::span<std::byte> bytes) override;
  int TierOf(const RowRange& rows) const override { return host_->TierOf(rows); }
  absl::Status Rest(SequenceId sequence, int rank, std::span<const PageId> pages) override {
    return host_->Rest(sequence, rank, pages);
  }
  absl::StatusOr<std::vector<absl::StatusOr<int64_t>>> Ask(SequenceId sequence, int rank,
                                                           std::span<const PageId> pages) override;
  int LowestTierOf(SequenceId sequence, std::span<const PageId> pages) const override {
    return host_->LowestTierOf(sequence, pages);
  }
  int LowestTierOf(const PageRange& range) const override { return host_->LowestTierOf(range); }
  HostPressure Pressure() override;
  // At once in the slab; what lies below is erased by the next Turn().
  absl::Status Release(SequenceId sequence) override;
  void StopWriter(SequenceId sequence, int rank) override { host_->StopWriter(sequence, rank); }
  absl::Status Contest(SequenceId sequence, int rank, int64_t tokens) override {
    return host_->Contest(sequence, rank, tokens);
  }
  void EndContest(SequenceId sequence) override { host_->EndContest(sequence); }
  int64_t Watermark(SequenceId sequence, int rank) const override {
    return host_->Watermark(sequence, rank);
  }
  bool IsWriter(SequenceId sequence, int rank) const override {
    return host_->IsWriter(sequence, rank);
  }
  bool HasWriters(SequenceId sequence) const override { return host_->HasWriters(sequence); }
  int64_t HostBytes(SequenceId sequence) const override { return host_->HostBytes(sequence); }
  int64_t SequenceBytes(SequenceId sequence) const override {
    return host_->SequenceBytes(sequence);
  }
  int64_t HostBytesTogether(std::span<const SequenceId> sequences) const override {
    return host_->HostBytesTogether(sequences);
  }
  std::vector<int64_t> FreedBytes(std::span<const SequenceId> sequences) const override {
    return host_->FreedBytes(sequences);
  }
  absl::Status Extend(SequenceId sequence, int64_t max_tokens) override {
    return host_->Extend(sequence, max_tokens);
  }
  absl::Status Truncate(SequenceId sequence, int64_t tokens) override {
    return host_->Truncate(sequence, tokens);
  }
  absl::Status BringUp(SequenceId sequence, int64_t tokens) override;
  absl::Status CheckPages(SequenceId sequence) override { return host_->CheckPages(sequence); }
  using PageStore::BringUp;
  absl::Status MakeRoom(const absl::Status& full, SequenceId spared) override;
  using PageStore::MakeRoom;
  void SetPinned(SequenceId sequence, bool pinned) override { host_->SetPinned(sequence, pinned); }
  void SetOwner(SequenceId sequence, const std::string& tenant, PageDtype dtype) override {
    host_->SetOwner(sequence, tenant, dtype);
  }
  TenantBook& tenants() override { return host_->tenants(); }
  PageStoreStats Stats() const override;

  // One bounded piece of background work in each tier: erases what has ended, moves
  // pages down where a tier is nearly full. False when there was nothing to do.
  bool Turn();

  // A batch of the longest unused pages that may leave host memory, of one sequence or (0)
  // any: how many bytes did. 0: none is left, or the tiers below take none now.
  int64_t FlushBatch(SequenceId sequence) { return MoveDown(kHostTier, {.sequence = sequence}); }

  // After a restart, before anything else: as HostPageStore::Restore() says; the pages
  // that lie below are told to their tiers.
  absl::StatusOr<HostPageStore::Restored> Restore();

  // As HostPageStore says.
  absl::StatusOr<std::vector<WrittenPart>> Written(SequenceId sequence) const {
    return host_->Written(sequence);
  }
  bool has_lower_tiers() const { return !below_.empty(); }
  const Slab& slab() const { return host_->slab(); }
  Slab& slab() { return host_->slab(); }

 private:
  struct Below {
    std::unique_ptr<LowerTier> tier;
    TierStats counters;  // bytes and pages are the tier's own
    absl::Time rests_until = absl::InfinitePast();
    bool draining = false;            // above the high watermark, and not yet at the low one
    bool refuses = false;             // since on_change was told
    std::deque<SequenceId> to_erase;  // ended sequences; bounded by what the tier holds
  };
  // A batch on its way.
  struct Batch {
    std::vector<std::byte> memory;
    std::vector<PagePlace> places;
    std::vector<PageCopy> copies;  // of `places`, in `memory`, as they are to be stored
    std::vector<StoredAs> stored_as;
    int damaged = 0;  // pages that were to come along
  };

  // Tiers are counted from the host's 0.
  int num_tiers() const { return static_cast<int>(below_.size()) + 1; }
  LowerTier& TierAt(int tier) const { return *below_[tier - 1].tier; }

  // Bytes that have left the tier for the next one: a batch of one sequence. `freed`: of the
  // slab, of which pages that others hold, too, free nothing.
  int64_t MoveDown(int from, const MoveFilter& filter = {}, int64_t* freed = nullptr);
  // Of the tenant's own, but not of `except`.
  absl::Status MakeTenantRoom(const absl::Status& full, const TenantShortage& tenant,
                              SequenceId except = 0);
  // In the tenant's quota of host memory, for pages of the sequence that come up.
  absl::Status MakeQuotaRoom(SequenceId sequence, const std::vector<PagePlace>& below);
  int64_t MoveBatch(int from, int to, const Batch& batch, int64_t* freed);
  Batch CopyBatch(int from, const std::vector<PagePlace>& places);
  // As it is stored, and as its ranks wrote it.
  absl::Status CopyPage(const PagePlace& place, std::span<std::byte> bytes);
  absl::Status CopyDecoded(const PagePlace& place, std::span<std::byte> page);
  // Codes a page of the host in its place, if it is to be: its bytes then.
  std::span<std::byte> Encode(const PagePlace& place, std::span<std::byte> page, StoredAs* as);
  int64_t FinishMoves(int from, int to, const Batch& batch, const std::vector<absl::Status>& stored,
                      int64_t* freed);
  // The next one below that is not left alone; 0: none.
  int TargetBelow(int from);
  bool IsAboveWatermark(int tier);
  bool EraseEnded(int tier);
  void EraseLater(int tier, SequenceId sequence);
  absl::Status ReadBelow(const PagePlace& place, const RowRange& rows, std::span<std::byte> bytes);
  // Unless the slab would hold more than that.
  bool Promote(const PagePlace& place, std::span<const std::byte> page, int64_t max_used_bytes);
  // Others move down for it, but not pages of sequence `except`.
  absl::Status BringUpPage(const PagePlace& place, SequenceId except = 0);
  absl::Status NoRoomFor(SequenceId sequence, int64_t tokens);
  // ordered_page_store_rest.cc
  absl::Status BringUpRange(const PageRange& range);
  absl::StatusOr<int64_t> AskPage(SequenceId sequence, int rank, const PageId& page);
  HostPressure FindPressure(int64_t wanted_bytes);
  // Somebody has found no room for so much.
  void NoteWanted(int64_t bytes);

  // What the tier said to pages: its first refusal, or OK.
  void Note(int tier, const absl::Status& stored);
  void CountFailure(int tier, const absl::Status& status);

  const std::unique_ptr<HostPageStore> host_;
  const OrderedStoreOptions options_;
  Clock& clock_;
  // Of moves out of each tier, from the host's 0: taken in this order, and before others.
  // So the room that a tier is found to have is there when pages come.
  std::array<Mutex, kMaxTiers> move_mutexes_;
  mutable Mutex mutex_;       // of everything below but the tiers themselves
  std::vector<Below> below_;  // its size and its tiers never change
  bool host_draining_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t below_bytes_read_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_set<SequenceId> lowered_ ABSL_GUARDED_BY(mutex_);  // may have pages below
  HostPressure pressure_ ABSL_GUARDED_BY(mutex_);
  absl::Time pressure_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();  // it is good
  int64_t wanted_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // the most that was refused
  absl::Time wanted_until_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
};

}  // namespace heavywater
