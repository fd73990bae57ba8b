// Whether the server still takes on new work.
#pragma once

#include <atomic>

#include "absl/status/status.h"

namespace heavywater {

// Thread safe.
class DrainGate {
 public:
  void Close() { closed_ = true; }
  // UNAVAILABLE while the server drains.
  absl::Status Check() const {
    if (!closed_) return absl::OkStatus();
    return absl::UnavailableError("the cache service is draining");
  }

 private:
  std::atomic<bool> closed_ = false;
};

}  // namespace heavywater
