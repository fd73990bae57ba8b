#include "worker/server/remote_host_tier.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

constexpr absl::Duration kCloseWait = absl::Seconds(1);

}  // namespace

RemoteHostTier::RemoteHostTier(CacheLink& link, RemoteHostTierOptions options)
    : link_(link), client_(link), options_(options) {
  AttachAgain();
  link_.SetListener([this](SequenceId sequence) { NoteUnknown(sequence); });
  thread_ = std::thread([this] { Run(); });
}

RemoteHostTier::~RemoteHostTier() {
  link_.RemoveListener();
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    work_.SignalAll();
  }
  thread_.join();
}

void RemoteHostTier::Expect(SequenceId sequence, int64_t max_tokens, absl::Duration lease) {
  MutexLock lock(&mutex_);
  const absl::Time deadline = absl::Now() + kCloseWait;
  const auto ends = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto found = entries_.find(sequence);
    return found != entries_.end() && found->second.closing();
  };
  while (ends() && absl::Now() < deadline) {
    work_.SignalAll();
    changed_.WaitWithTimeout(&mutex_, absl::Milliseconds(20));
  }
  if (ends()) return;  // OpenSequence() refuses it
  Entry& entry = entries_[sequence];
  entry.max_tokens = max_tokens;
  entry.lease = lease;
}

void RemoteHostTier::Forget(SequenceId sequence) {
  MutexLock lock(&mutex_);
  const auto found = entries_.find(sequence);
  if (found != entries_.end() && found->second.sequence == nullptr) entries_.erase(found);
}

RemoteHostTier::Entry* RemoteHostTier::FindOpen(SequenceId sequence) {
  const auto found = entries_.find(sequence);
  if (found == entries_.end()) return nullptr;
  Entry& entry = found->second;
  return entry.sequence == nullptr || entry.closing() ? nullptr : &entry;
}

absl::Status RemoteHostTier::OpenSequence(SequenceId sequence, const PageGeometry& geometry,
                                          HeadRange heads) {
  HW_RETURN_IF_ERROR(geometry.Validate());
  MutexLock lock(&mutex_);
  Entry& entry = entries_[sequence];
  if (entry.sequence != nullptr) {
    return absl::AlreadyExistsError(absl::StrCat("sequence ", sequence, " is open"));
  }
  entry.sequence =
      std::make_unique<RemoteSequence>(sequence, geometry, heads, slab_, options_.backend);
  link_.AddSequence(sequence);
  entry.listed = true;
  return absl::OkStatus();
}

absl::Status RemoteHostTier::Reserve(SequenceId sequence, int64_t first_page, int64_t num_pages) {
  MutexLock lock(&mutex_);
  Entry* entry = FindOpen(sequence);
  if (entry == nullptr) {
    return absl::NotFoundError(absl::StrCat("sequence ", sequence, " is not open"));
  }
  const int64_t end_page = first_page + num_pages;
  if (entry->sequence->num_pages() >= end_page) return absl::OkStatus();
  // Nobody would ever take what is written there: its positions count as dropped.
  if (entry->orphan) {
    return absl::UnavailableError(
        absl::StrCat("the cache service does not know sequence ", sequence, " any more"));
  }
  // Pages that the rank leaves out will not be asked for later.
  if (entry->sequence->num_pages() < first_page) {
    entry->sequence->SkipPages(entry->sequence->num_pages(), first_page);
  }
  const int64_t wanted_before = entry->wanted_pages;
  entry->wanted_pages = std::max(wanted_before, end_page);
  entry->refused = absl::OkStatus();
  WaitForPages(*entry, end_page);
  if (entry->sequence->num_pages() >= end_page) return absl::OkStatus();
  if (absl::IsResourceExhausted(entry->refused)) {
    entry->wanted_pages = wanted_before;
    return entry->refused;
  }
  return HoldLocally(*entry, end_page);
}

void RemoteHostTier::WaitForPages(Entry& entry, int64_t end_page) {
  if (entry.orphan || !link_.up()) return;
  entry.next_try = absl::InfinitePast();
  work_.SignalAll();
  const absl::Time deadline = absl::Now() + options_.reserve_timeout;
  while (entry.sequence->num_pages() < end_page && entry.refused.ok() && !entry.orphan &&
         absl::Now() < deadline) {
    changed_.WaitWithTimeout(&mutex_, deadline - absl::Now());
  }
}

absl::Status RemoteHostTier::HoldLocally(Entry& entry, int64_t end_page) {
  int64_t held = 0;
  for (const auto& [id, other] : entries_) {
    if (other.sequence != nullptr) held += other.sequence->ungranted_bytes();
  }
  const int64_t more = (end_page - entry.sequence->num_pages()) * entry.sequence->page_row_bytes();
  if (held + more > options_.max_local_bytes) {
    // Not RESOURCE_EXHAUSTED: an outage never stops a sequence.
    return absl::UnavailableError(absl::StrCat(
        "the cache service gives no pages and this worker holds ", held, " bytes for it already: ",
        more, " more would exceed its limit of ", options_.max_local_bytes));
  }
  return entry.sequence->AddLocalPages(end_page);
}

void RemoteHostTier::Skip(SequenceId sequence, int64_t first_page, int64_t num_pages) {
  MutexLock lock(&mutex_);
  Entry* entry = FindOpen(sequence);
  if (entry == nullptr) return;
  entry->sequence->SkipPages(first_page, first_page + num_pages);
  // The service hears of it before the watermark passes the pages.
  entry->next_try = absl::InfinitePast();
  work_.SignalAll();
}

int64_t RemoteHostTier::StoredTokens(SequenceId sequence) const {
  MutexLock lock(&mutex_);
  const auto found = entries_.find(sequence);
  if (found == entries_.end() || found->second.sequence == nullptr) return 0;
  const Entry& entry = found->second;
  return entry.orphan || IsFenced(entry) ? 0 : entry.sequence->stored();
}

bool RemoteHostTier::IsLost(SequenceId sequence) const {
  MutexLock lock(&mutex_);
  const auto found = entries_.find(sequence);
  if (found == entries_.end()) return false;
  // Also before Page() or Publish() notice it: nothing may be read any more.
  const Entry& entry = found->second;
  return entry.orphan || (entry.sequence != nullptr && IsFenced(entry));
}

std::byte* RemoteHostTier::Page(SequenceId sequence, int layer, int kv_head, int64_t page) {
  MutexLock lock(&mutex_);
  Entry* entry = FindOpen(sequence);
  // The place of an orphan in the slab may belong to somebody else by now.
  if (entry == nullptr || MayNotWrite(*entry)) return nullptr;
  std::byte* const memory = entry->sequence->Page(layer, kv_head, page);
  entry->writing = entry->writing || memory != nullptr;
  return memory;
}

void RemoteHostTier::Publish(SequenceId sequence, int64_t tokens) {
  MutexLock lock(&mutex_);
  Entry* entry = FindOpen(sequence);
  if (entry == nullptr) return;
  entry->writing = false;
  // The watermark lies in the slab, too.
  if (MayNotWrite(*entry)) {
    StopListing(*entry);
    return;
  }
  entry->sequence->Publish(tokens);
  if (HasWork(*entry)) work_.SignalAll();
}

void RemoteHostTier::CloseSequence(SequenceId sequence) {
  MutexLock lock(&mutex_);
  Entry* entry = FindOpen(sequence);
  if (entry == nullptr) return;
  entry->closed = absl::Now();
  entry->writing = false;
  if (entry->orphan) StopListing(*entry);
  work_.SignalAll();
}

void RemoteHostTier::WhenWritten(SequenceId sequence, std::function<void()> done) {
  {
    MutexLock lock(&mutex_);
    const auto found = entries_.find(sequence);
    if (found != entries_.end() && found->second.sequence != nullptr) {
      found->second.when_written = std::move(done);
      return;
    }
  }
  done();
}

int64_t RemoteHostTier::reserved_bytes() const {
  MutexLock lock(&mutex_);
  int64_t bytes = 0;
  for (const auto& [id, entry] : entries_) {
    if (entry.sequence == nullptr || entry.orphan) continue;
    bytes += entry.sequence->reserved_bytes();
  }
  return bytes;
}

bool RemoteHostTier::uses_slab() const {
  MutexLock lock(&mutex_);
  return slab_ != nullptr;
}

bool RemoteHostTier::Flush(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  MutexLock lock(&mutex_);
  const auto behind = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return std::any_of(entries_.begin(), entries_.end(), [](const auto& named) {
      const Entry& entry = named.second;
      return entry.sequence != nullptr && !entry.orphan &&
             entry.sequence->committed() < entry.sequence->published();
    });
  };
  while (behind() && absl::Now() < deadline) {
    changed_.WaitWithTimeout(&mutex_, deadline - absl::Now());
  }
  return !behind();
}

}  // namespace heavywater
