// The host tier's side of pages that several sequences hold.
#include <algorithm>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/host_page_store.h"

namespace heavywater {
namespace {

absl::Status Ended(SequenceId sequence) {
  return absl::NotFoundError(absl::StrCat("sequence ", sequence, " is unknown or has ended"));
}

}  // namespace

// Both records are kept, the source's first: a restart between the two finds pages that may
// be shared and are not.
absl::StatusOr<int64_t> HostPageStore::OpenFrom(const SequenceSpec& spec,
                                                const PageSource& source) {
  HW_ASSIGN_OR_RETURN(const EntryPtr from, Find(source.sequence));
  MutexLock source_lock(&from->mutex);
  if (from->released) return Ended(source.sequence);
  HW_RETURN_IF_ERROR(from->pages.CheckSource(spec));
  const int64_t page_tokens = from->pages.spec().geometry.page_tokens;
  const int64_t most = std::clamp<int64_t>(source.tokens, 0, std::max<int64_t>(spec.max_tokens, 0));
  const int64_t tokens =
      source.fork ? from->pages.CopyableTokens(most)
                  : from->pages.PreparedPages(most / page_tokens, /*exact=*/true) * page_tokens;
  if (source.fork && tokens < source.min_tokens) {
    HW_RETURN_IF_ERROR(from->pages.CheckCopyable(source.min_tokens));
    return absl::InvalidArgumentError(
        absl::StrCat("min_tokens is ", source.min_tokens, ", want ", most, " or fewer"));
  }
  const int64_t row = from->pages.pages_of_row();
  std::vector<int64_t> offsets;
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Admit(spec,
                                                  {.held_pages = tokens / page_tokens * row,
                                                   .new_pages = tokens % page_tokens == 0 ? 0 : row,
                                                   .grows = !source.fork},
                                                  &offsets));
  MutexLock entry_lock(&entry->mutex);
  entry->pages.TakeFrom(from->pages, tokens, offsets);
  if (source.fork) entry->pages.StopAll();
  Hold(entry->pages);
  Save(*from);
  Save(*entry);
  return tokens;
}

// What was one's alone has two holders now, what was shared has one more.
void HostPageStore::Hold(const SequencePages& taker) {
  MutexLock lock(&mutex_);
  for (const auto& [offset, crc] : taker.SharedPages()) {
    if (holders_.Holders(offset) == 0) HW_CHECK(holders_.Add(offset, crc));  // the source
    HW_CHECK(holders_.Add(offset, crc));
  }
}

// A page at a time, so that others get at the sequence in between.
absl::StatusOr<int64_t> HostPageStore::PrepareShare(SequenceId sequence, int64_t tokens,
                                                    bool exact) {
  for (int64_t page = 0;; ++page) {
    HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
    MutexLock entry_lock(&entry->mutex);
    if (entry->released) return Ended(sequence);
    const int64_t page_tokens = entry->pages.spec().geometry.page_tokens;
    if (page >= tokens / page_tokens) return page * page_tokens;
    const absl::StatusOr<bool> ready = entry->pages.PreparePage(page, exact);
    Save(*entry);
    if (!ready.ok()) {
      MutexLock lock(&mutex_);
      ++counters_.checksum_failures;
    }
    if (!ready.ok() || !*ready) return page * page_tokens;
  }
}

absl::Status HostPageStore::CheckPages(SequenceId sequence) {
  for (int64_t page = 0;; ++page) {
    HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
    MutexLock entry_lock(&entry->mutex);
    if (entry->released) return Ended(sequence);
    if (page >= entry->pages.WrittenPages()) return absl::OkStatus();
    const absl::Status checked = entry->pages.CheckPage(page);
    Save(*entry);
    if (checked.ok()) continue;
    MutexLock lock(&mutex_);
    ++counters_.checksum_failures;
    return checked;
  }
}

int64_t HostPageStore::HostBytesTogether(std::span<const SequenceId> sequences) const {
  int64_t bytes = 0;
  absl::flat_hash_set<int64_t> shared;
  for (const SequenceId sequence : sequences) {
    const absl::StatusOr<EntryPtr> entry = Find(sequence);
    if (!entry.ok()) continue;
    MutexLock entry_lock(&(*entry)->mutex);
    const SequencePages& pages = (*entry)->pages;
    int64_t count = pages.num_host_pages() - pages.num_shared();
    for (const auto& [offset, crc] : pages.SharedPages()) {
      if (shared.insert(offset).second) ++count;
    }
    bytes += count * Slab::RoundUp(pages.spec().geometry.page_bytes());
  }
  return bytes;
}

std::vector<int64_t> HostPageStore::FreedBytes(std::span<const SequenceId> sequences) const {
  std::vector<int64_t> freed;
  absl::flat_hash_map<int64_t, int64_t> let_go;  // of shared pages, by how many before
  for (const SequenceId sequence : sequences) {
    const absl::StatusOr<EntryPtr> entry = Find(sequence);
    freed.push_back(0);
    if (!entry.ok()) continue;
    MutexLock entry_lock(&(*entry)->mutex);
    const SequencePages& pages = (*entry)->pages;
    // It would only be kept until they have stopped.
    if (pages.has_writers()) continue;
    int64_t count = pages.num_host_pages() - pages.num_shared();
    const auto shared = pages.SharedPages();  // walks all pages: not under the store's mutex
    MutexLock lock(&mutex_);
    for (const auto& [offset, crc] : shared) {
      if (++let_go[offset] >= holders_.Holders(offset)) ++count;
    }
    freed.back() = count * Slab::RoundUp(pages.spec().geometry.page_bytes());
  }
  return freed;
}

int64_t HostPageStore::CountPages() const {
  std::vector<EntryPtr> entries;
  int64_t pages = 0;
  {
    MutexLock lock(&mutex_);
    for (const auto& [id, entry] : sequences_) entries.push_back(entry);
    for (const auto& [id, entry] : retiring_) entries.push_back(entry);
    pages = holders_.num_pages();
  }
  for (const EntryPtr& entry : entries) {
    MutexLock entry_lock(&entry->mutex);
    pages +=
        entry->pages.num_host_pages() - entry->pages.num_shared() + entry->pages.num_contested();
  }
  return pages;
}

}  // namespace heavywater
