// Pages that rest: the step's side, and that of the thread which calls the service.
#include <algorithm>

#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "worker/server/remote_host_tier.h"

namespace heavywater {
namespace {

constexpr absl::Duration kRetry = absl::Milliseconds(300);
// Of one call: telling is cheap, what is asked for must be read and sent up within its
// deadline.
constexpr size_t kMaxTell = 1024;
constexpr size_t kMaxAsk = 64;

RestRequests::Answer AnswerOf(int code) {
  switch (static_cast<absl::StatusCode>(code)) {
    case absl::StatusCode::kOk:
      return RestRequests::Answer::kThere;
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kDataLoss:
    case absl::StatusCode::kFailedPrecondition:
      return RestRequests::Answer::kGone;
    default:
      return RestRequests::Answer::kLater;
  }
}

}  // namespace

int64_t RemoteHostTier::BytesToRest(SequenceId sequence) {
  if (!link_.up()) return 0;
  const HostPressureNews news = link_.host_pressure();
  if (news.shortage_bytes <= 0) return 0;
  MutexLock lock(&mutex_);
  Entry* const entry = FindOpen(sequence);
  if (entry == nullptr || entry->orphan || entry->sequence->slab() == nullptr) return 0;
  const RemoteSequence& own = *entry->sequence;
  const int64_t page_bytes = own.geometry().page_bytes();
  const int64_t unknown = entry->rest.PagesUnknownAt(news.sent) * page_bytes;
  // As the service saw it: what rests by now did not then.
  const int64_t restable = own.reserved_bytes() - entry->rest.num_resting() * page_bytes + unknown;
  const double share =
      static_cast<double>(restable) / static_cast<double>(std::max(news.restable_bytes, restable));
  const auto part = static_cast<int64_t>(share * static_cast<double>(news.shortage_bytes));
  return std::max<int64_t>(part - unknown, 0);
}

void RemoteHostTier::Rest(SequenceId sequence, std::span<const PageId> pages) {
  MutexLock lock(&mutex_);
  Entry* const entry = FindOpen(sequence);
  if (entry == nullptr || MayNotWrite(*entry)) return;
  for (const PageId& page : pages) {
    if (!entry->sequence->MayRest(page)) continue;
    entry->rest.Rest(page, entry->sequence->SetMemory(page, nullptr));
  }
  work_.SignalAll();
}

void RemoteHostTier::Ask(SequenceId sequence, std::span<const PageId> pages) {
  MutexLock lock(&mutex_);
  Entry* const entry = FindOpen(sequence);
  if (entry == nullptr || MayNotWrite(*entry)) return;
  for (const PageId& page : pages) {
    std::byte* const address = entry->rest.Ask(page);
    if (address != nullptr) entry->sequence->SetMemory(page, address);
  }
  work_.SignalAll();
}

void RemoteHostTier::AwaitAsked(SequenceId sequence, absl::Duration max) {
  MutexLock lock(&mutex_);
  const absl::Time deadline = absl::Now() + max;
  // Also answers since the step was here last: it looks before it waits.
  while (asks_answered_ == asks_seen_ && absl::Now() < deadline) {
    const Entry* const entry = FindOpen(sequence);
    if (entry == nullptr || entry->orphan) break;
    changed_.WaitWithTimeout(&mutex_, deadline - absl::Now());
  }
  asks_seen_ = asks_answered_;
}

std::vector<PageId> RemoteHostTier::TakeGone(SequenceId sequence) {
  MutexLock lock(&mutex_);
  Entry* const entry = FindOpen(sequence);
  return entry == nullptr ? std::vector<PageId>() : entry->rest.TakeGone();
}

void RemoteHostTier::SyncRest(Entry& entry) {
  if (entry.orphan || entry.closing() || !entry.rest.has_work()) return;
  if (absl::Now() < entry.next_rest) return;
  if (!Tell(entry) || !AskService(entry)) entry.next_rest = absl::Now() + kRetry;
}

bool RemoteHostTier::Tell(Entry& entry) {
  const std::vector<PageId> pages = entry.rest.NextToTell(kMaxTell);
  if (pages.empty()) return true;
  const SequenceId id = entry.sequence->id();
  mutex_.Unlock();
  const absl::Status told = client_.Rest(id, pages);
  mutex_.Lock();
  // One that is refused stays where it is: it can be asked for all the same.
  const bool again = absl::IsUnavailable(told) || absl::IsDeadlineExceeded(told) ||
                     absl::IsCancelled(told) || absl::IsAborted(told);
  entry.rest.TellEnded(pages, !again, link_.clock().Now());
  return !again;
}

bool RemoteHostTier::AskService(Entry& entry) {
  const std::vector<PageId> pages = entry.rest.NextToAsk(kMaxAsk);
  if (pages.empty()) return true;
  RemoteSequence& sequence = *entry.sequence;
  mutex_.Unlock();
  const auto asked = client_.Ask(sequence.id(), pages);
  mutex_.Lock();
  const bool complete = asked.ok() && asked->offsets_size() == static_cast<int>(pages.size()) &&
                        asked->codes_size() == static_cast<int>(pages.size());
  bool all = complete;
  for (int i = 0; i < static_cast<int>(pages.size()); ++i) {
    RestRequests::Answer answer =
        complete ? AnswerOf(asked->codes(i)) : RestRequests::Answer::kLater;
    if (answer == RestRequests::Answer::kThere && !Return(entry, pages[i], asked->offsets(i))) {
      answer = RestRequests::Answer::kLater;
    }
    all = all && answer != RestRequests::Answer::kLater;
    entry.rest.AskEnded(pages[i], answer);
  }
  ++asks_answered_;
  changed_.SignalAll();
  return all;
}

// Not where the offset was given by a service whose slab is not mapped.
bool RemoteHostTier::Return(Entry& entry, const PageId& page, int64_t offset) {
  RemoteSequence& sequence = *entry.sequence;
  if (entry.orphan || sequence.slab() == nullptr || link_.epoch() != attached_epoch_) return false;
  std::byte* const address = sequence.slab()->At(offset, sequence.geometry().page_bytes());
  if (address == nullptr) return false;
  sequence.SetMemory(page, address);
  return true;
}

}  // namespace heavywater
