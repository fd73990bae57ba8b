// What RESOURCE_EXHAUSTED says beside its message, for programs that can act on
// it. Goes with the status as a payload; servers send it as google.rpc's
// QuotaFailure and RetryInfo.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace heavywater {

struct Shortage {
  std::string subject;  // what is full, as its limit is called in the configuration
  int64_t need = 0;     // all three in the limit's unit
  int64_t available = 0;
  int64_t limit = 0;
  // When it is worth another try; InfiniteDuration: waiting does not help.
  absl::Duration retry_after = absl::InfiniteDuration();
};

// RESOURCE_EXHAUSTED with both.
absl::Status ExhaustedError(absl::string_view message, const Shortage& shortage);

// None where the status carries none.
std::optional<Shortage> ShortageOf(const absl::Status& status);

}  // namespace heavywater
