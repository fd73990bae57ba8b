// The host tier's side of moves between tiers.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/host_page_store.h"

namespace heavywater {
namespace {

absl::Status Ended(SequenceId sequence) {
  return absl::NotFoundError(absl::StrCat("sequence ", sequence, " has ended"));
}

}  // namespace

int HostPageStore::TierOf(const RowRange& rows) const {
  const absl::StatusOr<EntryPtr> entry = Find(rows.sequence);
  if (!entry.ok()) return kHostTier;
  MutexLock entry_lock(&(*entry)->mutex);
  return (*entry)->pages.TierOf(rows);
}

std::vector<HostPageStore::EntryPtr> HostPageStore::LongestUnusedFirst() const {
  std::vector<std::pair<uint64_t, EntryPtr>> by_use;
  {
    MutexLock lock(&mutex_);
    by_use.reserve(sequences_.size());
    for (const auto& [id, entry] : sequences_) by_use.emplace_back(entry->last_use, entry);
  }
  std::sort(by_use.begin(), by_use.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<EntryPtr> entries;
  entries.reserve(by_use.size());
  for (auto& [use, entry] : by_use) entries.push_back(std::move(entry));
  return entries;
}

HostPageStore::Moves HostPageStore::BeginMoves(int from, int64_t max_bytes,
                                               const MoveFilter& filter) {
  Moves moves;
  for (const EntryPtr& entry : LongestUnusedFirst()) {
    MutexLock entry_lock(&entry->mutex);
    const SequenceSpec& spec = entry->pages.spec();
    if (filter.sequence != 0 && filter.sequence != spec.sequence) continue;
    if (filter.tenant.has_value() && *filter.tenant != spec.tenant) continue;
    if (entry->released) continue;
    const int64_t page_bytes = spec.geometry.page_bytes();
    if (from == kHostTier) {
      const int64_t freed = FreePages(*entry, entry->pages.TakeUnreadable());
      moves.freed_bytes += freed * Slab::RoundUp(page_bytes);
    }
    int64_t max_pages = std::max<int64_t>(1, max_bytes / page_bytes);
    if (from == kHostTier) {
      max_pages = std::min(max_pages, tenants_.LowerRoom(spec.tenant) / page_bytes);
    }
    const bool stays = entry->pinned || filter.except == spec.sequence;
    if (!stays) moves.pages = entry->pages.BeginMoves(from, max_pages);
    Save(*entry);
    if (!moves.pages.empty()) break;
  }
  return moves;
}

absl::Status HostPageStore::CopyOut(const PagePlace& place, std::span<std::byte> bytes) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(place.key.sequence));
  absl::Status status;
  {
    MutexLock entry_lock(&entry->mutex);
    status = entry->pages.CopyOut(place, bytes);
  }
  MutexLock lock(&mutex_);
  if (absl::IsDataLoss(status)) ++counters_.checksum_failures;
  return status;
}

Relocation HostPageStore::Relocate(const PagePlace& place, int to, const StoredAs& as,
                                   int64_t* freed) {
  const absl::StatusOr<EntryPtr> entry = Find(place.key.sequence);
  if (!entry.ok()) return Relocation::kGone;
  MutexLock entry_lock(&(*entry)->mutex);
  if ((*entry)->released) return Relocation::kGone;
  std::optional<int64_t> offset;
  const Relocation relocation = (*entry)->pages.Relocate(place, to, as, &offset);
  Save(**entry);
  if (offset.has_value()) {
    *freed += FreePages(**entry, {&*offset, 1}) * Slab::RoundUp(place.page_bytes);
  }
  if (relocation != Relocation::kMoved) return relocation;
  MutexLock lock(&mutex_);
  counters_.moved_down += offset.has_value() ? 1 : 0;
  counters_.residence[static_cast<size_t>(place.tier)].down.Add(ResidenceClock() - place.since);
  return relocation;
}

void HostPageStore::Settle(const PageKey& key) {
  const absl::StatusOr<EntryPtr> entry = Find(key.sequence);
  if (!entry.ok()) return;
  MutexLock entry_lock(&(*entry)->mutex);
  (*entry)->pages.Settle(key);
}

void HostPageStore::MarkStuck(const PageKey& key) {
  const absl::StatusOr<EntryPtr> entry = Find(key.sequence);
  if (!entry.ok()) return;
  MutexLock entry_lock(&(*entry)->mutex);
  (*entry)->pages.MarkStuck(key);
  Save(**entry);
}

std::optional<int64_t> HostPageStore::AllocateWithin(int64_t bytes, int64_t max_used_bytes) {
  MutexLock lock(&mutex_);
  const int64_t taken = slab_->used_bytes() + counters_.promised_bytes;
  if (taken + Slab::RoundUp(bytes) > max_used_bytes) return std::nullopt;
  const absl::StatusOr<int64_t> offset = slab_->Allocate(bytes);
  if (!offset.ok()) return std::nullopt;
  ++counters_.pages;
  return *offset;
}

bool HostPageStore::Promote(const PagePlace& place, std::span<const std::byte> bytes,
                            int64_t max_used_bytes) {
  const absl::StatusOr<EntryPtr> entry = Find(place.key.sequence);
  if (!entry.ok()) return false;
  MutexLock entry_lock(&(*entry)->mutex);
  if ((*entry)->released) return false;
  const int64_t taken = Slab::RoundUp(place.page_bytes);
  if (!HoldHost(**entry, taken).ok()) return false;
  const std::optional<int64_t> offset = AllocateWithin(place.page_bytes, max_used_bytes);
  if (!offset.has_value()) {
    ReturnHost(**entry, taken);
    return false;
  }
  if (!(*entry)->pages.Promote(place, *offset, bytes)) {
    FreePages(**entry, {&*offset, 1});
    return false;
  }
  Save(**entry);
  MutexLock lock(&mutex_);
  ++counters_.moved_up;
  counters_.residence[static_cast<size_t>(place.tier)].up.Add(ResidenceClock() - place.since);
  return true;
}

absl::StatusOr<std::vector<PagePlace>> HostPageStore::PagesBelow(SequenceId sequence,
                                                                 int64_t tokens) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
  {
    MutexLock lock(&mutex_);
    entry->last_use = ++use_count_;
  }
  MutexLock entry_lock(&entry->mutex);
  return entry->pages.PagesBelow(tokens);
}

absl::Status HostPageStore::BringUp(SequenceId sequence, int64_t tokens) {
  HW_ASSIGN_OR_RETURN(const std::vector<PagePlace> below, PagesBelow(sequence, tokens));
  if (below.empty()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(Describe(below[0].key), " is not in host memory"));
}

absl::Status HostPageStore::Truncate(SequenceId sequence, int64_t tokens) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
  MutexLock entry_lock(&entry->mutex);
  if (entry->released) return Ended(sequence);
  entry->pages.Truncate(tokens);
  FreePages(*entry, entry->pages.TakeUnreadable());
  return absl::OkStatus();
}

absl::Status HostPageStore::Extend(SequenceId sequence, int64_t max_tokens) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
  MutexLock entry_lock(&entry->mutex);
  if (entry->released) return Ended(sequence);
  const absl::Status extended = entry->pages.Extend(max_tokens);
  Save(*entry);
  return extended;
}

absl::StatusOr<std::vector<WrittenPart>> HostPageStore::Written(SequenceId sequence) const {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
  MutexLock entry_lock(&entry->mutex);
  if (entry->released) return Ended(sequence);
  return entry->pages.Written();
}

int64_t HostPageStore::TakenBytes() const {
  MutexLock lock(&mutex_);
  return slab_->used_bytes() + counters_.promised_bytes;
}

}  // namespace heavywater
