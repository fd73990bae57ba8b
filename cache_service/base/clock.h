// Time as a collaborator, so that tests decide what time it is.
#pragma once

#include "absl/time/time.h"

namespace heavywater {

// Thread safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual absl::Time Now() = 0;
  virtual void SleepFor(absl::Duration duration) = 0;

  // The machine's monotonic clock, which began at the wall clock's time when it
  // was first asked for: it never jumps. Never destroyed.
  static Clock& Real();
};

}  // namespace heavywater
