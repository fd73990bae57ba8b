// What positions compete by where exposure counts: what each of the queries that saw
// a position gave it, in a power. The same bits on every machine, as decay.
#pragma once

#include <cmath>
#include <cstdint>

namespace heavywater {

// n^gamma for n >= 1 and gamma >= 0, rounded to multiples of 2^-16: products of exact
// square roots, since pow() differs between libraries in the last bit.
inline double ExposurePower(int64_t n, double gamma) {
  const int64_t bits = std::llrint(gamma * 65536);
  double result = 1;
  double power = static_cast<double>(n);
  for (int64_t i = bits >> 16; i > 0; --i) result *= power;
  for (int64_t bit = 1 << 15; bit > 0; bit >>= 1) {
    power = std::sqrt(power);
    if ((bits & bit) != 0) result *= power;
  }
  return result;
}

// score / queries^gamma, rounded. `queries`: that have added to the score, at least 1.
inline int64_t ExposedValue(int64_t score, int64_t queries, double gamma) {
  if (gamma == 0) return score;
  return std::llrint(static_cast<double>(score) / ExposurePower(queries, gamma));
}

}  // namespace heavywater
