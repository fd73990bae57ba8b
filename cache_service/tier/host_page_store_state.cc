// What the host tier keeps for a restart, and how it goes on from it.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/host_page_store.h"

namespace heavywater {

void HostPageStore::Save(Entry& entry) {
  Recount(entry);
  if (state_ == nullptr) return;
  SequencePages::Kept kept = {.released = entry.released};
  {
    MutexLock lock(&mutex_);
    kept.promised_bytes = entry.promised_bytes;
  }
  StateBatch batch;
  entry.pages.TakeChanges(kept, batch);
  if (!batch.empty()) state_->Apply(batch);
}

void HostPageStore::EndPromise(Entry& entry) {
  int64_t ended = 0;
  {
    MutexLock lock(&mutex_);
    ended = std::exchange(entry.promised_bytes, 0);
  }
  if (ended > 0) entry.pages.NoteChange();
  Save(entry);
  MutexLock lock(&mutex_);
  counters_.promised_bytes -= ended;
}

absl::StatusOr<HostPageStore::Restored> HostPageStore::Restore() {
  Restored restored;
  HW_RETURN_IF_ERROR(
      state_->ForEach(StateKey(StateKind::kPages),
                      [&](std::string_view key, std::string_view record) -> absl::Status {
                        HW_ASSIGN_OR_RETURN(const StateId id, ParseStateKey(key));
                        return LoadSequence(id.id, record, &restored);
                      }));
  HW_RETURN_IF_ERROR(
      state_->ForEach(StateKey(StateKind::kPage),
                      [&](std::string_view key, std::string_view record) -> absl::Status {
                        HW_ASSIGN_OR_RETURN(const StateId id, ParseStateKey(key));
                        return LoadPage(id, record, &restored);
                      }));
  const int64_t pages = CountPages();
  std::vector<EntryPtr> entries;
  {
    MutexLock lock(&mutex_);
    CutPromises();
    counters_.pages = pages;
    for (const auto* all : {&sequences_, &retiring_}) {
      for (const auto& [id, entry] : *all) entries.push_back(entry);
    }
  }
  for (const EntryPtr& entry : entries) {
    MutexLock entry_lock(&entry->mutex);
    Recount(*entry);
  }
  return restored;
}

void HostPageStore::CutPromises() {
  for (const auto* entries : {&sequences_, &retiring_}) {
    for (const auto& [id, entry] : *entries) {
      const int64_t excess = counters_.promised_bytes - slab_->free_bytes();
      if (excess <= 0) return;
      Promise(*entry, std::max<int64_t>(0, entry->promised_bytes - excess));
    }
  }
}

absl::Status HostPageStore::LoadSequence(SequenceId id, std::string_view record,
                                         Restored* restored) {
  SequencePages::Kept kept;
  MutexLock lock(&mutex_);
  HW_ASSIGN_OR_RETURN(SequencePages pages, SequencePages::Load(id, record, *slab_, &kept));
  if (kept.released) {
    restored->retiring.push_back(id);
  } else {
    restored->live.push_back(id);
  }
  const int64_t held = HeldBytes(pages);
  auto entry = std::make_shared<Entry>(std::move(pages), /*keeps=*/true, kept.released);
  if (kept.released) entry->retiring_bytes = held;
  if (!kept.released) entry->retiring_bytes = ContestedBytes(entry->pages);
  Promise(*entry, std::min(kept.promised_bytes, slab_->total_bytes()));
  entry->last_use = ++use_count_;
  (kept.released ? retiring_ : sequences_).emplace(id, std::move(entry));
  return absl::OkStatus();
}

absl::Status HostPageStore::LoadPage(const StateId& id, std::string_view record,
                                     Restored* restored) {
  EntryPtr entry;
  {
    MutexLock lock(&mutex_);
    const auto live = sequences_.find(id.id);
    const auto retiring = retiring_.find(id.id);
    if (live != sequences_.end()) entry = live->second;
    if (retiring != retiring_.end()) entry = retiring->second;
  }
  if (entry == nullptr) {
    return absl::DataLossError(
        absl::StrCat("the state has a page of sequence ", id.id, ", but not the sequence"));
  }
  MutexLock entry_lock(&entry->mutex);
  MutexLock lock(&mutex_);
  HW_ASSIGN_OR_RETURN(const std::optional<PagePlace> below,
                      entry->pages.LoadPage(id.number, record, holders_));
  if (below.has_value()) restored->below.push_back(*below);
  if (entry->released) entry->retiring_bytes = HeldBytes(entry->pages);
  return absl::OkStatus();
}

}  // namespace heavywater
