// Rotary position embedding stretched beyond the context it was first trained on.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace heavywater {

struct RopeScaling {
  enum class Kind { kNone, kLinear, kLlama3, kYarn };
  Kind kind = Kind::kNone;
  double factor = 1;                 // contexts grow by it
  double original_context = 0;       // kLlama3, kYarn: positions before
  double low_frequency_factor = 1;   // kLlama3
  double high_frequency_factor = 4;  // kLlama3
  double beta_fast = 32;             // kYarn: turns in the original context above which
                                     // a pair is left as it is
  double beta_slow = 1;              // kYarn: below which it is stretched in full
  bool truncate = true;              // kYarn: the pairs' bounds are whole numbers
  std::optional<double> magnitude;   // kYarn: of the rotated vectors; else 0.1 ln(factor) + 1
};

// "none" (also "default"), "linear", "llama3", "yarn". UNIMPLEMENTED for others, naming
// `field`, the value and these.
absl::StatusOr<RopeScaling::Kind> ParseRopeScaling(std::string_view field, std::string_view name);

// By how much each pair of a head turns slower, [head_dim / 2]; empty for kNone.
// Linear: all by `factor`. Llama 3 (arXiv:2407.21783): pairs of a long wave by `factor`,
// those of a short one not at all, between them a blend. YaRN (arXiv:2309.00071): likewise
// with a linear ramp over the pairs.
std::vector<float> RopeFactors(const RopeScaling& scaling, int head_dim, double base);

// By what rotated vectors are multiplied: 1 but for YaRN.
double RopeMagnitude(const RopeScaling& scaling);

}  // namespace heavywater
