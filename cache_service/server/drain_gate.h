// Whether the server still takes on new work.
#pragma once

#include <atomic>

#include "absl/status/status.h"

namespace heavywater {

// Thread safe.
class DrainGate {
 public:
  // The process ends: nothing is taken on any more.
  void Close() { closed_ = true; }
  // An operator drains: what is there goes on.
  void SetDraining(bool draining) { draining_ = draining; }

  // UNAVAILABLE while the process ends.
  absl::Status Check() const {
    if (!closed_) return absl::OkStatus();
    return absl::UnavailableError("the cache service is draining");
  }
  // Likewise while an operator drains: for new sequences and values.
  absl::Status CheckNew() const {
    if (!draining_) return Check();
    return absl::UnavailableError("the cache service is draining: it takes no new work");
  }

 private:
  std::atomic<bool> closed_ = false;
  std::atomic<bool> draining_ = false;
};

}  // namespace heavywater
