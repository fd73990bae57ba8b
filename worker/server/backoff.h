// Delays between retries of something that another process must bring back.
#pragma once

#include <algorithm>

#include "absl/time/time.h"

namespace heavywater {

// Doubles from `first` to `longest`. Used by one thread.
class Backoff {
 public:
  Backoff(absl::Duration first, absl::Duration longest)
      : first_(first), longest_(longest), next_(first) {}

  // The next delay.
  absl::Duration Next() {
    const absl::Duration delay = next_;
    next_ = std::min(next_ * 2, longest_);
    return delay;
  }
  // After a success.
  void Reset() { next_ = first_; }

 private:
  const absl::Duration first_;
  const absl::Duration longest_;
  absl::Duration next_;
};

}  // namespace heavywater
