// What a candidate must reach to be among the best so far.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <vector>

namespace heavywater {

// Counts candidates by the upper bits of their values, sixteen buckets for each power of two,
// so that the bound rises with every candidate and nothing is sorted.
class PickThreshold {
 public:
  // `least`, above 0 and finite, is the first bound; `wanted`, at least 1: how many are chosen.
  void Start(int64_t wanted, float least) {
    std::fill(counts_.begin() + lowest_, counts_.begin() + highest_ + 1, 0);
    wanted_ = wanted;
    least_ = least;
    total_ = 0;
    lowest_ = highest_ = BucketOf(least);
  }

  // `value` is finite. False: it does not reach the bound, and does not count.
  bool Count(float value) {
    if (value < least_) return false;
    const int bucket = BucketOf(value);
    ++counts_[bucket];
    ++total_;
    highest_ = std::max(highest_, bucket);
    while (total_ - counts_[lowest_] >= wanted_) {
      total_ -= counts_[lowest_];
      counts_[lowest_++] = 0;
      least_ = std::bit_cast<float>(static_cast<uint32_t>(lowest_) << kDropped);
    }
    return true;
  }

  // So many as are wanted reach this: what does not can never be chosen.
  float least() const { return least_; }

 private:
  static constexpr int kDropped = 19;  // bits of a float that buckets do not tell apart
  static int BucketOf(float value) {
    return static_cast<int>(std::bit_cast<uint32_t>(value) >> kDropped);
  }

  std::vector<int64_t> counts_ = std::vector<int64_t>(4096);  // of all positive floats
  int64_t wanted_ = 1;
  float least_ = 0;
  int64_t total_ = 0;  // counted in [lowest_, highest_]
  int lowest_ = 0;
  int highest_ = 0;
};

}  // namespace heavywater
