#include "cache_service/base/clock.h"

#include <chrono>

#include "absl/time/clock.h"

namespace heavywater {
namespace {

// Leases must not end early, nor late, because somebody sets the wall clock.
class RealClock final : public Clock {
 public:
  absl::Time Now() override {
    return start_ + absl::FromChrono(std::chrono::steady_clock::now() - steady_start_);
  }
  void SleepFor(absl::Duration duration) override { absl::SleepFor(duration); }

 private:
  const absl::Time start_ = absl::Now();
  const std::chrono::steady_clock::time_point steady_start_ = std::chrono::steady_clock::now();
};

}  // namespace

Clock& Clock::Real() {
  static RealClock* const clock = new RealClock;
  return *clock;
}

}  // namespace heavywater
