// A clock that stands still until it is told to move.
#pragma once

#include "cache_service/base/clock.h"
#include "cache_service/base/mutex.h"

namespace heavywater {

// Thread safe.
class FakeClock final : public Clock {
 public:
  absl::Time Now() override {
    MutexLock lock(&mutex_);
    return now_;
  }
  void SleepFor(absl::Duration duration) override { Advance(duration); }
  void Advance(absl::Duration duration) {
    MutexLock lock(&mutex_);
    now_ += duration;
  }

 private:
  Mutex mutex_;
  absl::Time now_ ABSL_GUARDED_BY(mutex_) = absl::FromUnixSeconds(1'700'000'000);
};

}  // namespace heavywater
