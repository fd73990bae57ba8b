#include "worker/model/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <ranges>
#include <utility>
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

// The likeliest tokens that the options leave, in the order of the vocabulary.
class Shortlist {
  // Order of the heap, whose top is the likeliest, the lower of equals.
  auto LessLikely() const {
    return [this](int32_t a, int32_t b) {
      return Weight(a) != Weight(b) ? Weight(a) < Weight(b) : a > b;
    };
  }

 public:
  // `weights` are the tokens' unnormalised probabilities, `total` their sum.
  Shortlist(std::span<const double> weights, double total) : weights_(weights), total_(total) {
    for (size_t i = 0; i < weights.size(); ++i) heap_.push_back(static_cast<int32_t>(i));
    std::ranges::make_heap(heap_, LessLikely());
  }

  std::vector<int32_t> Take(const SamplerOptions& options) {
    if (options.top_k > 0) LimitTo(static_cast<size_t>(options.top_k));
    std::vector<int32_t> kept;
    double sum = 0;
    do {  // at least one, whatever rounding does
      kept.push_back(Pop());
      sum += Weight(kept.back());
    } while (!heap_.empty() && sum < options.top_p * total_);
    std::ranges::sort(kept);
    return kept;
  }

 private:
  double Weight(int32_t token) const { return weights_[static_cast<size_t>(token)]; }

  int32_t Pop() {
    std::ranges::pop_heap(heap_, LessLikely());
    const int32_t token = heap_.back();
    heap_.pop_back();
    return token;
  }

  void LimitTo(size_t count) {
    if (count >= heap_.size()) return;
    std::vector<int32_t> likeliest;
    total_ = 0;
    while (likeliest.size() < count) {
      likeliest.push_back(Pop());
      total_ += Weight(likeliest.back());
    }
    heap_ = std::move(likeliest);
    std::ranges::make_heap(heap_, LessLikely());
  }

  const std::span<const double> weights_;
  double total_;
  std::vector<int32_t> heap_;
};

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
  if (!(options.top_p > 0 && options.top_p <= 1)) {
    return absl::InvalidArgumentError(
        Message("top_p is ", options.top_p, ", want above 0 and at most 1"));
  }
  if (options.top_k < 0) {
    return absl::InvalidArgumentError(Message("top_k is ", options.top_k, ", want 0 or more"));
  }
  return Sampler(options);
}

absl::StatusOr<int32_t> Sampler::Sample(std::span<const float> logits) {
  HW_ASSIGN_OR_RETURN(const int32_t best, Best(logits));
  if (options_.temperature == 0) return best;
  const double highest = logits[static_cast<size_t>(best)];
  std::vector<double> weights;
  weights.reserve(logits.size());
  double total = 0;
  for (const float logit : logits) {
    weights.push_back(ExpOfNegative((logit - highest) / options_.temperature));
    total += weights.back();
  }
  if (options_.top_k > 0 || options_.top_p < 1) {
    const std::vector<int32_t> kept = Shortlist(weights, total).Take(options_);
    total = 0;
    for (const int32_t token : kept) total += weights[static_cast<size_t>(token)];
    return Draw(kept, weights, total, best);
  }
  return Draw(std::views::iota(0, static_cast<int32_t>(logits.size())), weights, total, best);
}

// The first token whose cumulative weight exceeds the target: one of weight 0 is never
// chosen. `best` if rounding makes the target the total.
template <class Tokens>
int32_t Sampler::Draw(const Tokens& tokens, std::span<const double> weights, double total,
                      int32_t best) {
  const double target = UniformAt(state_.seed, state_.draws++) * total;
  double sum = 0;
  for (const int32_t token : tokens) {
    sum += weights[static_cast<size_t>(token)];
    if (sum > target) return token;
  }
  return best;
}

}  // namespace heavywater
