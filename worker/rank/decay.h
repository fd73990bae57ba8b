// Decay of scores: the same bits on every machine, for residents (in the
// backend) and for demoted positions (here).
#pragma once

#include <cmath>
#include <cstdint>

namespace heavywater {

// base^exponent by multiplication alone.
inline double DecayPower(double base, int64_t exponent) {
  double result = 1;
  for (; exponent > 0; exponent /= 2, base *= base) {
    if (exponent % 2 == 1) result *= base;
  }
  return result;
}

inline int64_t Decayed(int64_t score, double factor) {
  return factor == 1.0 ? score : std::llrint(static_cast<double>(score) * factor);
}

}  // namespace heavywater
