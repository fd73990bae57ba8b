// Sequences that others are to hear of: a set, so that it never holds more than there are.
#pragma once

#include <map>
#include <optional>
#include <utility>

#include "absl/time/time.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/ids.h"
#include "cache_service/base/mutex.h"

namespace heavywater {

// Thread safe; Add() is short, for callers that hold a lock.
class ChangeQueue {
 public:
  // The clock must outlive it.
  explicit ChangeQueue(Clock& clock) : clock_(clock) {}

  void Add(SequenceId sequence) { AddLater(sequence, absl::ZeroDuration()); }
  // Not to be taken before `delay` has passed; one that waits already is taken no later.
  void AddLater(SequenceId sequence, absl::Duration delay);
  // One whose time has come, the first to have come; none: nothing for as long as `timeout`.
  std::optional<SequenceId> Take(absl::Duration timeout);
  // What was taken is done: until then it counts as waiting.
  void Done();
  // What waits for its work: the number, and how long the first has done so.
  int64_t size() const;
  absl::Duration Age() const;

 private:
  struct Waiting {
    absl::Time since;  // of its change
    absl::Time from;   // when it may be taken
  };
  std::optional<SequenceId> TakeDue() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Clock& clock_;
  mutable Mutex mutex_;
  CondVar added_;
  std::map<SequenceId, Waiting> waiting_ ABSL_GUARDED_BY(mutex_);
  std::optional<std::pair<SequenceId, absl::Time>> taken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
