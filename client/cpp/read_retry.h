// Repeats idempotent reads while a server cannot be reached.
#pragma once

#include <array>
#include <chrono>
#include <functional>

#include "absl/status/status.h"

namespace heavywater {

using Sleeper = std::function<void(std::chrono::milliseconds)>;

inline constexpr std::array<std::chrono::milliseconds, 3> kReadBackoffs = {
    std::chrono::milliseconds(100), std::chrono::milliseconds(400),
    std::chrono::milliseconds(1600)};

// Calls `read`, which returns absl::StatusOr<T>, again after each backoff when
// it is UNAVAILABLE. For calls that change nothing.
template <typename ReadFunction>
auto ReadWithRetries(const Sleeper& sleep, const ReadFunction& read) {
  for (const auto backoff : kReadBackoffs) {
    auto result = read();
    if (!absl::IsUnavailable(result.status())) return result;
    sleep(backoff);
  }
  return read();
}

}  // namespace heavywater
