#include "worker/comm/rendezvous.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace heavywater {

absl::Status InProcessRendezvous::Put(const std::string& key, const std::string& value) {
  MutexLock lock(&mutex_);
  values_[key] = value;
  changed_.SignalAll();
  return absl::OkStatus();
}

absl::StatusOr<std::string> InProcessRendezvous::Wait(const std::string& key,
                                                      absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  MutexLock lock(&mutex_);
  for (;;) {
    if (const auto found = values_.find(key); found != values_.end()) return found->second;
    const absl::Duration left = deadline - absl::Now();
    if (left <= absl::ZeroDuration()) {
      return absl::DeadlineExceededError(absl::StrCat("nobody put the rendezvous key \"", key,
                                                      "\" within ", absl::FormatDuration(timeout)));
    }
    changed_.WaitWithTimeout(&mutex_, left);
  }
}

}  // namespace heavywater
