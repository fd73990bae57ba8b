// Bounds how many lines somebody else's doing can put into the log.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "absl/time/time.h"
#include "cache_service/base/mutex.h"

namespace heavywater {

// Up to `per_second` lines in a second, on average and at once. Thread safe.
class LogLimit {
 public:
  explicit LogLimit(double per_second) : per_second_(per_second), allowed_(per_second) {}

  // Whether one more may be written now: how many were not since the last that was.
  std::optional<int64_t> Allow(absl::Time now) {
    MutexLock lock(&mutex_);
    if (now > last_) {
      const double more = last_ == absl::InfinitePast() ? per_second_ : Seconds(now) * per_second_;
      allowed_ = std::min(per_second_, allowed_ + more);
      last_ = now;
    }
    if (allowed_ < 1) {
      ++suppressed_;
      return std::nullopt;
    }
    allowed_ -= 1;
    const int64_t suppressed = suppressed_;
    suppressed_ = 0;
    return suppressed;
  }

 private:
  double Seconds(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return absl::ToDoubleSeconds(now - last_);
  }

  const double per_second_;
  Mutex mutex_;
  double allowed_ ABSL_GUARDED_BY(mutex_);
  absl::Time last_ ABSL_GUARDED_BY(mutex_) = absl::InfinitePast();
  int64_t suppressed_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace heavywater
