#include "cache_service/server/drainer.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/shortage.h"

namespace heavywater {
namespace {

constexpr absl::Duration kDefaultDeadline = absl::Minutes(1);

}  // namespace

v1::DrainState Drainer::StateOf(int64_t running) const {
  v1::DrainState state;
  state.set_running_sequences(running);
  state.set_suspended_by_drain(suspended_);
  state.set_deadline_in_ms(absl::ToInt64Milliseconds(deadline_ - clock_.Now()));
  return state;
}

bool Drainer::Describe(v1::DrainState* state) const {
  {
    MutexLock lock(&mutex_);
    if (!draining_) return false;
  }
  const auto running = static_cast<int64_t>(registry_.sequences().Running().size());
  MutexLock lock(&mutex_);
  *state = StateOf(running);
  return true;
}

void Drainer::Begin(const v1::DrainRequest& request, std::function<bool()> is_cancelled,
                    Answer answer) {
  absl::Status refused;
  {
    MutexLock lock(&mutex_);
    if (stopped_) refused = absl::UnavailableError("the cache service is ending");
    if (waiters_.size() >= kMaxWaiters) {
      refused = absl::ResourceExhaustedError(
          absl::StrCat(waiters_.size(), " calls wait for the drain's end already"));
    }
    if (refused.ok()) {
      if (!draining_) suspended_ = 0;
      draining_ = true;
      suspends_ = request.suspend();
      deadline_ =
          clock_.Now() + (request.deadline_ms() == 0 ? kDefaultDeadline
                                                     : absl::Milliseconds(request.deadline_ms()));
      waiters_.push_back({std::move(is_cancelled), answer});
    }
  }
  if (!refused.ok()) return answer(refused);
  gate_.SetDraining(true);
  ready_(false);
  Tick();
}

void Drainer::Undo() {
  {
    MutexLock lock(&mutex_);
    if (!draining_) return;
    draining_ = false;
  }
  gate_.SetDraining(false);
  ready_(true);
  AnswerAll(absl::CancelledError("the drain was undone"));
}

void Drainer::Stop() {
  {
    MutexLock lock(&mutex_);
    stopped_ = true;
  }
  AnswerAll(absl::UnavailableError("the cache service is ending"));
}

// Those that have no committed state yet are tried again, at the next Tick().
void Drainer::SuspendRunning(const std::vector<SequenceId>& running) {
  int64_t suspended = 0;
  for (const SequenceId id : running) {
    v1::SuspendSequenceRequest request;
    request.set_sequence_id(id);
    suspended += registry_.sequences().Suspend(request).ok() ? 1 : 0;
  }
  MutexLock lock(&mutex_);
  suspended_ += suspended;
}

void Drainer::Tick() {
  bool suspends = false;
  {
    MutexLock lock(&mutex_);
    if (!draining_) return;
    suspends = suspends_;
  }
  std::vector<SequenceId> running = registry_.sequences().Running();
  if (suspends && !running.empty()) {
    SuspendRunning(running);
    running = registry_.sequences().Running();
  }
  v1::DrainResponse response;
  std::vector<Waiter> answered;
  std::vector<Waiter> gone;
  {
    MutexLock lock(&mutex_);
    *response.mutable_drain() = StateOf(static_cast<int64_t>(running.size()));
    if (!running.empty() && clock_.Now() < deadline_) {
      std::vector<Waiter> left;
      for (Waiter& waiter : waiters_) {
        (waiter.is_cancelled() ? gone : left).push_back(std::move(waiter));
      }
      waiters_ = std::move(left);
    } else {
      answered = std::exchange(waiters_, {});
    }
  }
  for (const Waiter& waiter : answered) waiter.answer(response);
  // Not what a repeated request would be told: the drain goes on.
  for (const Waiter& waiter : gone) waiter.answer(absl::CancelledError("the caller has gone"));
}

void Drainer::AnswerAll(const absl::StatusOr<v1::DrainResponse>& response) {
  std::vector<Waiter> waiters;
  {
    MutexLock lock(&mutex_);
    waiters = std::exchange(waiters_, {});
  }
  for (const Waiter& waiter : waiters) waiter.answer(response);
}

}  // namespace heavywater
