#include "worker/model/sampler.h"

#include <cmath>
#include <limits>
#include <vector>

#include "cache_service/base/status.h"
#include "worker/model/message.h"

// Compiled without contraction to fused multiply-add: results must not depend
// on what the machine has.

namespace heavywater {
namespace {

constexpr uint64_t kGoldenGamma = 0x9e3779b97f4a7c15;

uint64_t Mix(uint64_t value) {
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

// exp(x) for x <= 0 to a relative error of about 1e-15; 0 below -700. libm's
// differ between platforms in the last bit.
double ExpOfNegative(double x) {
  if (x < -700) return 0;
  constexpr double kLog2e = 1.4426950408889634;
  constexpr double kLn2High = 0x1.62e42fefa0000p-1;  // its low bits are zero
  constexpr double kLn2Low = 0x1.cf79abc9e3b39p-40;
  const double halvings = std::floor(x * kLog2e + 0.5);
  const double r = (x - halvings * kLn2High) - halvings * kLn2Low;  // |r| < 0.35
  double sum = 1;
  for (int n = 14; n >= 1; --n) sum = 1 + r * sum / n;  // Taylor, by Horner's rule
  return std::ldexp(sum, static_cast<int>(halvings));
}

// The highest logit, ties to the lower token.
absl::StatusOr<int32_t> Best(std::span<const float> logits) {
  int32_t best = -1;
  float best_logit = -std::numeric_limits<float>::infinity();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!(logits[i] < std::numeric_limits<float>::infinity())) {
      return absl::InvalidArgumentError(
          Message("the logit of token ", i, " is ", logits[i], ", want a number"));
    }
    if (logits[i] > best_logit) {
      best_logit = logits[i];
      best = static_cast<int32_t>(i);
    }
  }
  if (best < 0) {
    return absl::InvalidArgumentError(
        Message("none of ", logits.size(), " logits is above -infinity"));
  }
  return best;
}

}  // namespace

double UniformAt(uint64_t seed, uint64_t index) {
  // The seed is mixed first, so that neighbouring seeds share no numbers.
  const uint64_t bits = Mix(Mix(seed + kGoldenGamma) + (index + 1) * kGoldenGamma);
  return static_cast<double>(bits >> 11) * 0x1p-53;
}

absl::StatusOr<Sampler> Sampler::Create(const SamplerOptions& options) {
  if (!std::isfinite(options.temperature) || options.temperature < 0) {
    return absl::InvalidArgumentError(
        Message("temperature is ", options.temperature, ", want 0 or more"));
  }
  return Sampler(options);
}

absl::StatusOr<int32_t> Sampler::Sample(std::span<const float> logits) {
  HW_ASSIGN_OR_RETURN(const int32_t best, Best(logits));
  if (temperature_ == 0) return best;
  const double highest = logits[static_cast<size_t>(best)];
  std::vector<double> cumulative;
  cumulative.reserve(logits.size());
  double total = 0;
  for (const float logit : logits) {
    total += ExpOfNegative((logit - highest) / temperature_);
    cumulative.push_back(total);
  }
  const double target = UniformAt(state_.seed, state_.draws++) * total;
  // The first token whose cumulative weight exceeds the target: one of weight 0
  // is never chosen. `best` if rounding makes the target the total.
  for (size_t i = 0; i < cumulative.size(); ++i) {
    if (cumulative[i] > target) return static_cast<int32_t>(i);
  }
  return best;
}

}  // namespace heavywater
