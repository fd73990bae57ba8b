#include "cache_service/tier/host_page_store.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/shortage.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

// Sequences end at any time: what has no room now may have some soon.
constexpr absl::Duration kRetryAfter = absl::Seconds(1);

absl::Status Unknown(SequenceId sequence) {
  return absl::NotFoundError(absl::StrCat("sequence ", sequence, " is unknown or has ended"));
}

// Saturates: sizes come from requests.
int64_t Times(int64_t a, int64_t b) {
  int64_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) return std::numeric_limits<int64_t>::max();
  return product;
}

int64_t PromptBytes(const SequenceSpec& spec) {
  const int64_t pages = Times(spec.geometry.PagesFor(spec.prompt_tokens),
                              int64_t{spec.geometry.num_layers} * spec.geometry.num_kv_heads);
  return Times(pages, Slab::RoundUp(spec.geometry.page_bytes()));
}

absl::Status CheckSpec(const SequenceSpec& spec) {
  HW_RETURN_IF_ERROR(spec.geometry.Validate());
  if (spec.num_ranks < 1 || spec.num_ranks > kMaxWriters) {
    return absl::InvalidArgumentError(
        absl::StrCat("num_ranks is ", spec.num_ranks, ", want 1 to ", kMaxWriters));
  }
  constexpr int64_t kMaxTokens = std::numeric_limits<Position>::max();
  if (spec.max_tokens < 1 || spec.max_tokens > kMaxTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("max_tokens is ", spec.max_tokens, ", want 1 to ", kMaxTokens));
  }
  if (spec.prompt_tokens < 0 || spec.prompt_tokens > spec.max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("prompt_tokens is ", spec.prompt_tokens,
                                                   ", want 0 to max_tokens ", spec.max_tokens));
  }
  return absl::OkStatus();
}

}  // namespace

HostPageStore::HostPageStore(std::unique_ptr<Slab> slab, StateStore* state)
    : slab_(std::move(slab)), state_(state) {}

absl::StatusOr<HostPageStore::EntryPtr> HostPageStore::Find(SequenceId sequence) const {
  MutexLock lock(&mutex_);
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) return Unknown(sequence);
  return found->second;
}

absl::Status HostPageStore::CheckRoom(int64_t need, int64_t own_promise) {
  const int64_t held = counters_.promised_bytes - own_promise;  // for other prompts
  if (need <= slab_->free_bytes() - held) return absl::OkStatus();
  ++counters_.reservations_refused;
  const int64_t available = std::max<int64_t>(0, slab_->free_bytes() - held);
  const int64_t limit = slab_->total_bytes();
  return ExhaustedError(absl::StrCat("host tier: need ", need, " bytes, ", available, " are free (",
                                     held, " more are held for admitted prompts) of ", limit),
                        {.subject = "host_bytes",
                         .need = need,
                         .available = available,
                         .limit = limit,
                         .retry_after = need <= limit ? kRetryAfter : absl::InfiniteDuration()});
}

void HostPageStore::Promise(Entry& entry, int64_t bytes) {
  counters_.promised_bytes += bytes - entry.promised_bytes;
  entry.promised_bytes = bytes;
}

absl::Status HostPageStore::Open(const SequenceSpec& spec) {
  std::vector<int64_t> none;
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Admit(spec, {}, &none));
  MutexLock entry_lock(&entry->mutex);
  Save(*entry);
  return absl::OkStatus();
}

absl::StatusOr<HostPageStore::EntryPtr> HostPageStore::Admit(const SequenceSpec& spec,
                                                             const Beginning& begins,
                                                             std::vector<int64_t>* pages) {
  HW_RETURN_IF_ERROR(CheckSpec(spec));
  const int64_t held_bytes = Times(begins.held_pages, Slab::RoundUp(spec.geometry.page_bytes()));
  const int64_t prompt_bytes =
      begins.grows ? std::max<int64_t>(0, PromptBytes(spec) - held_bytes) : 0;
  const int64_t num_pages = begins.new_pages;
  const int64_t watermarks_bytes = SequencePages::WatermarksBytes(spec.num_ranks);
  const int64_t page_bytes = spec.geometry.page_bytes();
  MutexLock lock(&mutex_);
  if (sequences_.contains(spec.sequence) || retiring_.contains(spec.sequence)) {
    return absl::AlreadyExistsError(absl::StrCat("sequence ", spec.sequence, " exists"));
  }
  const int64_t new_bytes = Times(num_pages, Slab::RoundUp(page_bytes));
  const int64_t now = Slab::RoundUp(watermarks_bytes) + new_bytes;
  const int64_t limit = std::numeric_limits<int64_t>::max() - now;
  const int64_t need = std::min(prompt_bytes, limit) + now;
  // The quota first: no room is made among others for what does not fit into it. Pages that
  // others hold, too, count for each.
  const TenantUse hold = {.host_bytes = std::min(prompt_bytes, slab_->total_bytes()) +
                                        std::min(held_bytes, slab_->total_bytes()) + new_bytes,
                          .sequences = IsValue(spec.sequence) ? 0 : 1};
  HW_RETURN_IF_ERROR(tenants_.TryHold(spec.tenant, hold));
  absl::Status room = CheckRoom(need, /*own_promise=*/0);
  absl::StatusOr<std::vector<int64_t>> watermarks;
  if (room.ok()) watermarks = Allocate(1, watermarks_bytes, 0);
  room.Update(watermarks.status());
  absl::StatusOr<std::vector<int64_t>> allocated;
  if (room.ok()) {
    allocated = Allocate(num_pages, page_bytes, 0);
    room.Update(allocated.status());
    if (!room.ok()) slab_->Free((*watermarks)[0], watermarks_bytes);
  }
  if (!room.ok()) {
    tenants_.Change(spec.tenant, {.host_bytes = -hold.host_bytes, .sequences = -hold.sequences});
    return room;
  }
  *pages = *std::move(allocated);
  counters_.pages += num_pages;
  auto entry =
      std::make_shared<Entry>(SequencePages(spec, (*watermarks)[0], *slab_), state_ != nullptr,
                              /*is_released=*/false, hold);
  Promise(*entry, prompt_bytes);
  entry->last_use = ++use_count_;
  sequences_.emplace(spec.sequence, entry);
  return entry;
}

absl::StatusOr<std::vector<int64_t>> HostPageStore::Allocate(int64_t count, int64_t bytes,
                                                             int64_t own_promise) {
  HW_RETURN_IF_ERROR(CheckRoom(Times(count, Slab::RoundUp(bytes)), own_promise));
  std::vector<int64_t> offsets;
  offsets.reserve(count);
  for (int64_t i = 0; i < count; ++i) {
    const absl::StatusOr<int64_t> offset = slab_->Allocate(bytes);
    if (offset.ok()) {
      offsets.push_back(*offset);
      continue;
    }
    for (const int64_t taken : offsets) slab_->Free(taken, bytes);
    ++counters_.reservations_refused;
    return offset.status();
  }
  return offsets;
}

absl::StatusOr<Reservation> HostPageStore::Reserve(const PageRange& range, bool direct) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(range.sequence));
  MutexLock entry_lock(&entry->mutex);
  if (entry->released) return Unknown(range.sequence);
  SequencePages& pages = entry->pages;
  HW_RETURN_IF_ERROR(pages.CheckRange(range));
  HW_ASSIGN_OR_RETURN(const SequencePages::Missing missing, pages.CountMissing(range));
  const int64_t page_bytes = pages.spec().geometry.page_bytes();
  const int64_t taken_bytes = Slab::RoundUp(page_bytes);
  absl::StatusOr<std::vector<int64_t>> offsets;
  {
    MutexLock lock(&mutex_);
    // A sequence's own promise is for its prompt only: what decode needs beyond
    // must not eat into the prompts of others, nor count on its own.
    const int64_t own = std::min(Times(missing.prompt_pages, taken_bytes), entry->promised_bytes);
    const int64_t more = Times(missing.pages, taken_bytes) - own;
    HW_RETURN_IF_ERROR(HoldHost(*entry, more));
    offsets = Allocate(missing.pages, page_bytes, own);
    if (!offsets.ok()) {
      ReturnHost(*entry, more);
      return offsets.status();
    }
    Promise(*entry, entry->promised_bytes - own);
    counters_.pages += missing.pages;
  }
  std::vector<int64_t> left;
  Reservation reservation = pages.Fill(range, missing.watermark, *offsets, direct, &left);
  FreePages(*entry, left);
  NoteContested(*entry);
  return reservation;
}

absl::Status HostPageStore::Write(int rank, const RowRange& rows,
                                  std::span<const std::byte> bytes) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(rows.sequence));
  {
    MutexLock entry_lock(&entry->mutex);
    if (entry->released) return Unknown(rows.sequence);
    HW_RETURN_IF_ERROR(entry->pages.Write(rank, rows, bytes));
    Save(*entry);
  }
  MutexLock lock(&mutex_);
  ++counters_.writes;
  counters_.bytes_written += static_cast<int64_t>(bytes.size());
  return absl::OkStatus();
}

absl::Status HostPageStore::Commit(SequenceId sequence, int rank, int64_t tokens) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
  MutexLock entry_lock(&entry->mutex);
  if (entry->released) return Unknown(sequence);
  const absl::Status committed = entry->pages.Commit(rank, tokens);
  Save(*entry);
  return committed;
}

absl::StatusOr<int64_t> HostPageStore::Abort(SequenceId sequence, int rank) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
  MutexLock entry_lock(&entry->mutex);
  if (entry->released) return Unknown(sequence);
  return FreePages(*entry, entry->pages.TakeUncommitted(rank));
}

absl::StatusOr<int64_t> HostPageStore::Skip(SequenceId sequence, int rank, int64_t first_page,
                                            int64_t num_pages) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
  MutexLock entry_lock(&entry->mutex);
  if (entry->released) return Unknown(sequence);
  HW_ASSIGN_OR_RETURN(const std::vector<int64_t> offsets,
                      entry->pages.Skip(rank, first_page, num_pages));
  return FreePages(*entry, offsets);
}

int64_t HostPageStore::FreePages(Entry& entry, std::span<const int64_t> offsets) {
  Save(entry);
  MutexLock lock(&mutex_);
  int64_t freed = 0;
  for (const int64_t offset : offsets) {
    if (!holders_.Drop(offset)) continue;
    slab_->Free(offset, entry.pages.spec().geometry.page_bytes());
    ++freed;
  }
  counters_.pages -= freed;
  return freed;
}

absl::Status HostPageStore::Read(const RowRange& rows, std::span<std::byte> bytes) {
  HW_ASSIGN_OR_RETURN(const std::optional<PagePlace> elsewhere, ReadOrLocate(rows, bytes));
  if (!elsewhere.has_value()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(Describe(elsewhere->key), " is not in host memory"));
}

absl::StatusOr<std::optional<PagePlace>> HostPageStore::ReadOrLocate(const RowRange& rows,
                                                                     std::span<std::byte> bytes) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(rows.sequence));
  absl::StatusOr<std::optional<PagePlace>> elsewhere;
  {
    MutexLock entry_lock(&entry->mutex);
    if (entry->released) return Unknown(rows.sequence);
    elsewhere = entry->pages.Read(rows, bytes);
    Save(*entry);
  }
  MutexLock lock(&mutex_);
  if (elsewhere.ok()) {
    entry->last_use = ++use_count_;
    if (!elsewhere->has_value()) {
      ++counters_.reads;
      counters_.bytes_read += static_cast<int64_t>(bytes.size());
    }
  }
  if (absl::IsDataLoss(elsewhere.status())) ++counters_.checksum_failures;
  return elsewhere;
}

absl::Status HostPageStore::Release(SequenceId sequence) {
  HW_ASSIGN_OR_RETURN(const EntryPtr entry, Find(sequence));
  MutexLock entry_lock(&entry->mutex);  // waits for a read or write in progress
  if (entry->released) return Unknown(sequence);
  entry->released = true;
  bool retires = false;
  {
    MutexLock lock(&mutex_);
    sequences_.erase(sequence);
    retires = entry->pages.has_writers();
    if (retires) {
      entry->retiring_bytes = HeldBytes(entry->pages);
      retiring_.emplace(sequence, entry);
    }
  }
  if (retires) {
    entry->pages.NoteChange();
    EndPromise(*entry);
  } else {
    FreeAll(*entry);
  }
  return absl::OkStatus();
}

int64_t HostPageStore::HeldBytes(const SequencePages& pages) {
  const SequenceSpec& spec = pages.spec();
  const int64_t own = pages.num_host_pages() - pages.num_shared() + pages.num_contested();
  return own * Slab::RoundUp(spec.geometry.page_bytes()) +
         Slab::RoundUp(SequencePages::WatermarksBytes(spec.num_ranks)) +
         pages.num_cells() * Slab::RoundUp(kWatermarkCellBytes);
}

void HostPageStore::StopWriter(SequenceId sequence, int rank) {
  const EntryPtr entry = FindAny(sequence);
  if (entry == nullptr) return;
  MutexLock entry_lock(&entry->mutex);
  entry->pages.StopWriter(rank);
  FreeContested(*entry, entry->pages.EndContest(rank));
  if (entry->pages.all_stopped()) {
    EndPromise(*entry);
  } else {
    Save(*entry);
  }
  FreeIfStopped(*entry);
}

void HostPageStore::FreeIfStopped(Entry& entry) {
  {
    MutexLock lock(&mutex_);
    const bool done = entry.released && !entry.pages.has_writers();
    if (!done || retiring_.erase(entry.pages.spec().sequence) == 0) return;
  }
  FreeAll(entry);
}

void HostPageStore::FreeAll(Entry& entry) {
  const SequenceSpec& spec = entry.pages.spec();
  if (state_ != nullptr) {
    StateBatch batch;
    batch.Delete(StateKey(StateKind::kPages, spec.sequence));
    batch.DeletePrefix(StateKey(StateKind::kPage, spec.sequence));
    state_->Apply(batch);
    entry.pages.StopTracking();
  }
  FreePages(entry, entry.pages.TakeAll());
  const std::vector<int64_t> cells = entry.pages.TakeCells();
  {
    MutexLock lock(&mutex_);
    Promise(entry, 0);
    for (const int64_t cell : cells) slab_->Free(cell, kWatermarkCellBytes);
    slab_->Free(entry.pages.watermarks_offset(), SequencePages::WatermarksBytes(spec.num_ranks));
  }
  Recount(entry);
}

int64_t HostPageStore::Watermark(SequenceId sequence, int rank) const {
  const auto entry = Find(sequence);
  if (!entry.ok()) return 0;
  MutexLock entry_lock(&(*entry)->mutex);
  return (*entry)->released ? 0 : (*entry)->pages.Watermark(rank);
}

bool HostPageStore::IsWriter(SequenceId sequence, int rank) const {
  const auto entry = Find(sequence);
  if (!entry.ok()) return false;
  MutexLock entry_lock(&(*entry)->mutex);
  return !(*entry)->released && (*entry)->pages.IsWriter(rank);
}

bool HostPageStore::HasWriters(SequenceId sequence) const {
  const auto entry = Find(sequence);
  if (!entry.ok()) return false;
  MutexLock entry_lock(&(*entry)->mutex);
  return (*entry)->pages.has_writers();
}

int64_t HostPageStore::HostBytes(SequenceId sequence) const {
  const auto entry = Find(sequence);
  if (!entry.ok()) return 0;
  MutexLock entry_lock(&(*entry)->mutex);
  const SequencePages& pages = (*entry)->pages;
  return pages.num_host_pages() * Slab::RoundUp(pages.spec().geometry.page_bytes());
}

int64_t HostPageStore::SequenceBytes(SequenceId sequence) const {
  const auto entry = Find(sequence);
  if (!entry.ok()) return 0;
  MutexLock entry_lock(&(*entry)->mutex);
  const SequencePages& pages = (*entry)->pages;
  return pages.num_pages() * Slab::RoundUp(pages.spec().geometry.page_bytes());
}

PageStoreStats HostPageStore::Stats() const {
  const int64_t resting_pages = RestingPages();
  MutexLock lock(&mutex_);
  PageStoreStats stats = counters_;
  stats.resting_pages = resting_pages;
  stats.total_bytes = slab_->total_bytes();
  stats.used_bytes = slab_->used_bytes();
  stats.free_bytes = slab_->free_bytes();
  stats.sequences = static_cast<int64_t>(sequences_.size());
  stats.shared_pages = holders_.num_shared();
  for (const auto* entries : {&sequences_, &retiring_}) {
    for (const auto& [sequence, entry] : *entries) stats.retiring_bytes += entry->retiring_bytes;
  }
  return stats;
}

}  // namespace heavywater
