// Chooses the next token from logits.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/statusor.h"

namespace heavywater {

// With both limits top_k comes first, top_p takes its share of what is left.
struct SamplerOptions {
  double temperature = 0;  // 0 = greedy, where the limits change nothing
  double top_p = 1;        // the likeliest tokens that have this probability together
  int top_k = 0;           // so many of the likeliest tokens; 0 = all
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
  // INVALID_ARGUMENT unless the temperature is finite and not negative, top_p above 0 and
  // at most 1, top_k not negative.
  static absl::StatusOr<Sampler> Create(const SamplerOptions& options);

  const SamplerState& state() const { return state_; }
  void Restore(const SamplerState& state) { state_ = state; }

  // Greedy: the highest logit, ties to the lower token; draws nothing.
  // Otherwise token i with probability softmax(logits / temperature)[i], of the tokens
  // within top_k and top_p (ties to the lower token); one draw. INVALID_ARGUMENT for no logits,
  // for one that is NaN or +infinity (-infinity excludes a token), and where none is above
  // -infinity; nothing is drawn then.
  absl::StatusOr<int32_t> Sample(std::span<const float> logits);

 private:
  explicit Sampler(const SamplerOptions& options) : options_(options), state_{options.seed, 0} {}

  template <class Tokens>
  int32_t Draw(const Tokens& tokens, std::span<const double> weights, double total, int32_t best);

  SamplerOptions options_;
  SamplerState state_;
};

}  // namespace heavywater
