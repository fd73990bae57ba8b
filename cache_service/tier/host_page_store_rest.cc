// The host tier's side of pages that rest while their sequence goes on.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/host_page_store.h"

namespace heavywater {
namespace {

absl::Status CheckCount(std::span<const PageId> pages) {
  const auto count = static_cast<int64_t>(pages.size());
  if (count <= kMaxPagesPerRest) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("pages are ", count, ", want at most ", kMaxPagesPerRest, " in one call"));
}

absl::Status Ended(SequenceId sequence) {
  return absl::NotFoundError(absl::StrCat("sequence ", sequence, " is unknown or has ended"));
}

}  // namespace

absl::Status HostPageStore::Rest(SequenceId sequence, int rank, std::span<const PageId> pages) {
  HW_RETURN_IF_ERROR(CheckCount(pages));
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
  MutexLock entry_lock(&entry->mutex);
  if (entry->released) return Ended(sequence);
  HW_RETURN_IF_ERROR(entry->pages.Rest(rank, pages));
  Save(*entry);
  return absl::OkStatus();
}

absl::StatusOr<SequencePages::Asked> HostPageStore::AskOrLocate(SequenceId sequence, int rank,
                                                                const PageId& page) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
  MutexLock entry_lock(&entry->mutex);
  if (entry->released) return Ended(sequence);
  absl::StatusOr<SequencePages::Asked> asked = entry->pages.Ask(rank, page);
  Save(*entry);
  return asked;
}

absl::StatusOr<std::vector<absl::StatusOr<int64_t>>> HostPageStore::Ask(
    SequenceId sequence, int rank, std::span<const PageId> pages) {
  HW_RETURN_IF_ERROR(CheckCount(pages));
  HW_RETURN_IF_ERROR(Find(sequence).status());
  std::vector<absl::StatusOr<int64_t>> offsets;
  for (const PageId& page : pages) {
    const absl::StatusOr<SequencePages::Asked> asked = AskOrLocate(sequence, rank, page);
    if (!asked.ok()) {
      offsets.push_back(asked.status());
    } else if (asked->below.has_value()) {
      offsets.push_back(absl::UnavailableError(
          absl::StrCat(Describe(asked->below->key), " is not in host memory")));
    } else {
      offsets.push_back(asked->offset);
    }
  }
  return offsets;
}

int HostPageStore::LowestTierOf(SequenceId sequence, std::span<const PageId> pages) const {
  const absl::StatusOr<EntryPtr> entry = Find(sequence);
  if (!entry.ok()) return kHostTier;
  MutexLock entry_lock(&(*entry)->mutex);
  return (*entry)->pages.LowestTierOf(pages);
}

int HostPageStore::LowestTierOf(const PageRange& range) const {
  int lowest = kHostTier;
  const absl::StatusOr<std::vector<PagePlace>> below = PagesBelow(range);
  if (!below.ok()) return lowest;
  for (const PagePlace& place : *below) lowest = std::max(lowest, place.tier);
  return lowest;
}

absl::StatusOr<std::vector<PagePlace>> HostPageStore::PagesBelow(const PageRange& range) const {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(range.sequence));
  MutexLock entry_lock(&entry->mutex);
  HW_RETURN_IF_ERROR(entry->pages.CheckRange(range));
  return entry->pages.PagesBelow(range);
}

void HostPageStore::StopResting(SequenceId sequence) {
  const absl::StatusOr<EntryPtr> entry = Find(sequence);
  if (!entry.ok()) return;
  MutexLock entry_lock(&(*entry)->mutex);
  // Ranks that go on believe that their pages rest until they ask for them: another sequence
  // that begins with these only reads them.
  if ((*entry)->released || !(*entry)->pages.all_stopped()) return;
  (*entry)->pages.StopResting();
  Save(**entry);
}

int64_t HostPageStore::PageBytes(SequenceId sequence) const {
  const absl::StatusOr<EntryPtr> entry = Find(sequence);
  if (!entry.ok()) return 0;
  MutexLock entry_lock(&(*entry)->mutex);
  return Slab::RoundUp((*entry)->pages.spec().geometry.page_bytes());
}

int64_t HostPageStore::MovableBytes() const {
  int64_t bytes = 0;
  for (const EntryPtr& entry : LongestUnusedFirst()) {
    MutexLock entry_lock(&entry->mutex);
    if (entry->released || entry->pinned) continue;
    bytes += entry->pages.num_movable() * Slab::RoundUp(entry->pages.spec().geometry.page_bytes());
  }
  return bytes;
}

int64_t HostPageStore::RestingPages() const {
  int64_t pages = 0;
  for (const EntryPtr& entry : LongestUnusedFirst()) {
    MutexLock entry_lock(&entry->mutex);
    pages += entry->pages.num_resting();
  }
  return pages;
}

void HostPageStore::NoteAsked(int64_t pages, int64_t lost) {
  MutexLock lock(&mutex_);
  counters_.pages_asked += pages;
  counters_.pages_lost += lost;
}

}  // namespace heavywater
