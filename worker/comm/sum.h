// Element-wise sums for collectives.
#pragma once

#include <cstdint>
#include <span>

namespace heavywater {

// total[i] = a[i] + b[i]; `total` may be `a`. All of one length. Terms are added
// in rank order everywhere, so that every rank gets the same bits.
void Add(std::span<const float> a, std::span<const float> b, std::span<float> total);

// Exact; a sum that does not fit wraps modulo 2^64.
void Add(std::span<const int64_t> a, std::span<const int64_t> b, std::span<int64_t> total);

}  // namespace heavywater
