// A wait that ends early when its owner stops.
#pragma once

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"

namespace heavywater {

// Thread safe.
class StopFlag {
 public:
  void Stop() {
    MutexLock lock(&mutex_);
    stopped_ = true;
    changed_.SignalAll();
  }
  bool stopped() const {
    MutexLock lock(&mutex_);
    return stopped_;
  }
  // Sleeps; true when stopped meanwhile.
  bool WaitFor(absl::Duration duration) {
    const absl::Time deadline = absl::Now() + duration;
    MutexLock lock(&mutex_);
    while (!stopped_ && absl::Now() < deadline) {
      changed_.WaitWithTimeout(&mutex_, deadline - absl::Now());
    }
    return stopped_;
  }

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  bool stopped_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace heavywater
