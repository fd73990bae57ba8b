// How old positions are when they lose their slots: what an operator tunes budgets by.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>

namespace heavywater {

// Ages are tokens seen since the position, its own included; counted by powers of two.
class EvictionAges {
 public:
  // Bucket b: ages of at most 2^b that are in no lower one; the last one has all others.
  static constexpr int kBuckets = 25;
  using Counts = std::array<int64_t, kBuckets>;

  void Add(int64_t age) {
    const int bucket = std::bit_width(static_cast<uint64_t>(std::max<int64_t>(age, 1) - 1));
    ++counts_[std::min(bucket, kBuckets - 1)];
    sum_ += age;
  }
  const Counts& counts() const { return counts_; }
  int64_t sum() const { return sum_; }

 private:
  Counts counts_ = {};
  int64_t sum_ = 0;
};

}  // namespace heavywater
