#include "cache_service/cluster/change_queue.h"

#include <algorithm>

namespace heavywater {
namespace {

// How long a waiter sleeps at a time: what was added for later comes due meanwhile.
constexpr absl::Duration kStep = absl::Milliseconds(50);

}  // namespace

void ChangeQueue::AddLater(SequenceId sequence, absl::Duration delay) {
  MutexLock lock(&mutex_);
  const absl::Time now = clock_.Now();
  // One that comes again while its work is under way has waited since then.
  const bool again =
      delay > absl::ZeroDuration() && taken_.has_value() && taken_->first == sequence;
  const auto [entry, added] =
      waiting_.try_emplace(sequence, Waiting{again ? taken_->second : now, now + delay});
  if (!added) entry->second.from = std::min(entry->second.from, now + delay);
  added_.Signal();
}

std::optional<SequenceId> ChangeQueue::TakeDue() {
  const absl::Time now = clock_.Now();
  auto first = waiting_.end();
  for (auto entry = waiting_.begin(); entry != waiting_.end(); ++entry) {
    if (entry->second.from > now) continue;
    if (first == waiting_.end() || entry->second.since < first->second.since) first = entry;
  }
  if (first == waiting_.end()) return std::nullopt;
  taken_ = {first->first, first->second.since};
  waiting_.erase(first);
  return taken_->first;
}

std::optional<SequenceId> ChangeQueue::Take(absl::Duration timeout) {
  MutexLock lock(&mutex_);
  for (absl::Duration left = timeout;; left -= kStep) {
    const std::optional<SequenceId> due = TakeDue();
    if (due.has_value() || left <= absl::ZeroDuration()) return due;
    added_.WaitWithTimeout(&mutex_, std::min(left, kStep));
  }
}

void ChangeQueue::Done() {
  MutexLock lock(&mutex_);
  taken_.reset();
}

int64_t ChangeQueue::size() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(waiting_.size()) + (taken_.has_value() ? 1 : 0);
}

absl::Duration ChangeQueue::Age() const {
  MutexLock lock(&mutex_);
  absl::Time first = taken_.has_value() ? taken_->second : absl::InfiniteFuture();
  for (const auto& [sequence, waiting] : waiting_) first = std::min(first, waiting.since);
  if (first == absl::InfiniteFuture()) return absl::ZeroDuration();
  return std::max(absl::ZeroDuration(), clock_.Now() - first);
}

}  // namespace heavywater
