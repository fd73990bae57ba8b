// The host tier's side of ranks that go on with another process.
#include <algorithm>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/host_page_store.h"

namespace heavywater {

HostPageStore::EntryPtr HostPageStore::FindAny(SequenceId sequence) const {
  MutexLock lock(&mutex_);
  const auto live = sequences_.find(sequence);
  if (live != sequences_.end()) return live->second;
  const auto retiring = retiring_.find(sequence);
  return retiring == retiring_.end() ? nullptr : retiring->second;
}

absl::Status HostPageStore::Contest(SequenceId sequence, int rank, int64_t tokens) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
  MutexLock entry_lock(&entry->mutex);
  if (entry->released) {
    return absl::NotFoundError(absl::StrCat("sequence ", sequence, " has ended"));
  }
  // Contested already, and the process that it was contested for has got no pages: its cell
  // serves the next one, which finds room however often others took what there was.
  const std::vector<int> ranks = entry->pages.ContestedRanks();
  const bool again = std::find(ranks.begin(), ranks.end(), rank) != ranks.end();
  std::optional<int64_t> cell;
  if (entry->pages.MayWriteInPlace(rank)) {
    MutexLock lock(&mutex_);
    HW_ASSIGN_OR_RETURN(const std::vector<int64_t> cells,
                        Allocate(1, kWatermarkCellBytes, /*own_promise=*/0));
    cell = cells[0];
  } else if (!again) {
    return absl::OkStatus();
  }
  entry->pages.Contest(rank, tokens, cell);
  Save(*entry);
  NoteContested(*entry);
  return absl::OkStatus();
}

void HostPageStore::EndContest(SequenceId sequence) {
  const EntryPtr entry = FindAny(sequence);
  if (entry == nullptr) return;
  MutexLock entry_lock(&entry->mutex);
  for (const int rank : entry->pages.ContestedRanks()) {
    FreeContested(*entry, entry->pages.EndContest(rank));
  }
  Save(*entry);
  FreeIfStopped(*entry);
}

void HostPageStore::FreeContested(Entry& entry, const ContestedMemory& memory) {
  if (memory.pages.empty() && memory.cells.empty()) return;
  FreePages(entry, memory.pages);
  {
    MutexLock lock(&mutex_);
    for (const int64_t cell : memory.cells) slab_->Free(cell, kWatermarkCellBytes);
  }
  Recount(entry);
  NoteContested(entry);
}

int64_t HostPageStore::ContestedBytes(const SequencePages& pages) {
  return pages.num_contested() * Slab::RoundUp(pages.spec().geometry.page_bytes());
}

void HostPageStore::NoteContested(Entry& entry) {
  const int64_t bytes = entry.released ? HeldBytes(entry.pages) : ContestedBytes(entry.pages);
  MutexLock lock(&mutex_);
  entry.retiring_bytes = bytes;
}

}  // namespace heavywater
