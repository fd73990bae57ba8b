#include "worker/model/rope_scaling.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>
#include <utility>

#include "worker/model/message.h"

namespace heavywater {
namespace {

constexpr double kTurn = 2 * std::numbers::pi;

constexpr std::array<std::pair<std::string_view, RopeScaling::Kind>, 5> kNames = {
    {{"none", RopeScaling::Kind::kNone},
     {"default", RopeScaling::Kind::kNone},
     {"linear", RopeScaling::Kind::kLinear},
     {"llama3", RopeScaling::Kind::kLlama3},
     {"yarn", RopeScaling::Kind::kYarn}}};

// Of a pair that turns by `frequency` radians a position.
double Llama3Factor(const RopeScaling& scaling, double frequency) {
  const double waves = scaling.original_context * frequency / kTurn;  // in the first context
  if (waves < scaling.low_frequency_factor) return scaling.factor;
  if (waves > scaling.high_frequency_factor) return 1;
  const double blend = (waves - scaling.low_frequency_factor) /
                       (scaling.high_frequency_factor - scaling.low_frequency_factor);
  return 1 / ((1 - blend) / scaling.factor + blend);
}

// The pair, as a real number, that makes `turns` in the original context.
double YarnPair(const RopeScaling& scaling, double turns, int head_dim, double base) {
  return head_dim * std::log(scaling.original_context / (turns * kTurn)) / (2 * std::log(base));
}

class YarnRamp {
 public:
  YarnRamp(const RopeScaling& scaling, int head_dim, double base) : factor_(scaling.factor) {
    low_ = YarnPair(scaling, scaling.beta_fast, head_dim, base);
    high_ = YarnPair(scaling, scaling.beta_slow, head_dim, base);
    if (scaling.truncate) {
      low_ = std::floor(low_);
      high_ = std::ceil(high_);
    }
    low_ = std::max(low_, 0.0);
    high_ = std::min(high_, head_dim - 1.0);
    if (low_ == high_) high_ += 0.001;  // a step, as in the published code
  }

  double Factor(int pair) const {
    const double stretched = std::clamp((pair - low_) / (high_ - low_), 0.0, 1.0);
    return 1 / (stretched / factor_ + 1 - stretched);
  }

 private:
  double factor_;
  double low_ = 0;
  double high_ = 0;
};

}  // namespace

absl::StatusOr<RopeScaling::Kind> ParseRopeScaling(std::string_view field, std::string_view name) {
  for (const auto& [known, kind] : kNames) {
    if (name == known) return kind;
  }
  return absl::UnimplementedError(
      Message("field '", field, "' is ", Quoted(name), ", want one of none, linear, llama3, yarn"));
}

std::vector<float> RopeFactors(const RopeScaling& scaling, int head_dim, double base) {
  if (scaling.kind == RopeScaling::Kind::kNone) return {};
  const YarnRamp ramp(scaling, head_dim, base);
  std::vector<float> factors;
  for (int pair = 0; pair < head_dim / 2; ++pair) {
    double factor = scaling.factor;
    if (scaling.kind == RopeScaling::Kind::kLlama3) {
      factor = Llama3Factor(scaling, std::pow(base, -2.0 * pair / head_dim));
    } else if (scaling.kind == RopeScaling::Kind::kYarn) {
      factor = ramp.Factor(pair);
    }
    factors.push_back(static_cast<float>(factor));
  }
  return factors;
}

double RopeMagnitude(const RopeScaling& scaling) {
  if (scaling.kind != RopeScaling::Kind::kYarn) return 1;
  if (scaling.magnitude.has_value()) return *scaling.magnitude;
  return scaling.factor > 1 ? 0.1 * std::log(scaling.factor) + 1 : 1;
}

}  // namespace heavywater
