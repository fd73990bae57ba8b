// Counting pivotal positions (GainKind::kPivotal), the same comparison wherever it runs.
#pragma once

#include <cstdint>

#include "cache_service/base/ids.h"
#include "worker/policy/policy.h"

namespace heavywater {

inline constexpr int64_t kPivotalGain = int64_t{1} << 32;  // one query, as one probability of 1

// The probability above which a position is pivotal for a query at `query_position`.
inline double PivotalThreshold(int64_t query_position) {
  return kPivotalMargin / static_cast<double>(query_position + 1);
}

// gains[i] += kPivotalGain for every row with weights[r][i] * factors[r] > thresholds[r];
// rows with factor 0 count nothing. `weights` is [num_rows][stride].
inline void CountPivotal(const float* weights, int64_t stride, const double* factors,
                         const double* thresholds, int num_rows, int64_t count, int64_t* gains) {
  for (int row = 0; row < num_rows; ++row) {
    if (factors[row] == 0) continue;
    for (int64_t i = 0; i < count; ++i) {
      const double probability = double{weights[row * stride + i]} * factors[row];
      gains[i] += probability > thresholds[row] ? kPivotalGain : 0;
    }
  }
}

}  // namespace heavywater
