// Chooses the next token from logits.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"

namespace heavywater {

struct SamplerOptions {
  double temperature = 0;  // 0 = greedy
  uint64_t seed = 0;
};

// All that a sequence must keep to go on as if nothing had happened.
struct SamplerState {
  uint64_t seed = 0;
  uint64_t draws = 0;  // random numbers used so far

  friend bool operator==(const SamplerState&, const SamplerState&) = default;
};

// Number `index` of the random sequence of `seed`, uniform in [0, 1), a multiple
// of 2^-53: SplitMix64's output function over seed and index (Steele, Lea and
// Flood, OOPSLA 2014). Integer arithmetic only: the same on every machine.
double UniformAt(uint64_t seed, uint64_t index);

// The same options, state and logits give the same token on every machine: sums
// run in token order in double, with an exponential of our own.
class Sampler {
 public:
  // INVALID_ARGUMENT unless the temperature is finite and not negative.
  static absl::StatusOr<Sampler> Create(const SamplerOptions& options);

  const SamplerState& state() const { return state_; }
  void Restore(const SamplerState& state) { state_ = state; }

  // Greedy: the highest logit, ties to the lower token; draws nothing.
  // Otherwise token i with probability softmax(logits / temperature)[i]; one
  // draw. INVALID_ARGUMENT for no logits or one that is NaN or +infinity
  // (-infinity excludes a token), or none above -infinity; nothing is drawn then.
  absl::StatusOr<int32_t> Sample(std::span<const float> logits);

 private:
  explicit Sampler(const SamplerOptions& options)
      : temperature_(options.temperature), state_{options.seed, 0} {}

  double temperature_;
  SamplerState state_;
};

}  // namespace heavywater
