// A drain that an operator has asked for: no new work, and waiting until none runs.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/mutex.h"
#include "cache_service/registry/registry.h"
#include "cache_service/server/drain_gate.h"
#include "heavywater/v1/admin.pb.h"

namespace heavywater {

// Thread safe. Time passes in Tick().
class Drainer {
 public:
  using Answer = std::function<void(const absl::StatusOr<v1::DrainResponse>&)>;

  // All must outlive it.
  Drainer(Registry& registry, DrainGate& gate, Clock& clock)
      : registry_(registry), gate_(gate), clock_(clock) {}

  // Told, with no lock held, whether the service takes new work. Before anything else.
  void SetReadiness(std::function<void(bool ready)> ready) { ready_ = std::move(ready); }

  // The request has been checked. `answer` is called once: when nothing runs any more, at
  // the deadline, when the drain is undone (CANCELLED), or when the process ends
  // (UNAVAILABLE); `is_cancelled` says at any time whether the caller has gone (CANCELLED).
  void Begin(const v1::DrainRequest& request, std::function<bool()> is_cancelled, Answer answer);
  void Undo();
  // False while nobody drains.
  bool Describe(v1::DrainState* state) const;

  void Tick();
  // The process ends: nobody waits any more.
  void Stop();

 private:
  struct Waiter {
    std::function<bool()> is_cancelled;
    Answer answer;
  };
  static constexpr size_t kMaxWaiters = 64;

  v1::DrainState StateOf(int64_t running) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SuspendRunning(const std::vector<SequenceId>& running);
  void AnswerAll(const absl::StatusOr<v1::DrainResponse>& response);

  Registry& registry_;
  DrainGate& gate_;
  Clock& clock_;
  std::function<void(bool)> ready_ = nullptr;
  mutable Mutex mutex_;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
  bool suspends_ ABSL_GUARDED_BY(mutex_) = false;
  int64_t suspended_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Time deadline_ ABSL_GUARDED_BY(mutex_);
  std::vector<Waiter> waiters_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
