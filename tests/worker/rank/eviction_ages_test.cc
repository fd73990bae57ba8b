#include "worker/rank/eviction_ages.h"

#include <gtest/gtest.h>

namespace heavywater {
namespace {

TEST(EvictionAgesTest, AreCountedByPowersOfTwoWithTheirBoundInTheLowerBucket) {
  EvictionAges ages;
  for (const int64_t age : {1, 2, 3, 4, 5, 1024, 1025}) ages.Add(age);
  EvictionAges::Counts want = {};
  want[0] = 1;   // 1
  want[1] = 1;   // 2
  want[2] = 2;   // 3 and 4
  want[3] = 1;   // 5
  want[10] = 1;  // 1024
  want[11] = 1;  // 1025
  EXPECT_EQ(ages.counts(), want);
  EXPECT_EQ(ages.sum(), 2064);
}

TEST(EvictionAgesTest, BeyondAllBoundsAreInTheLastBucket) {
  EvictionAges ages;
  ages.Add(int64_t{1} << 40);
  ages.Add((int64_t{1} << (EvictionAges::kBuckets - 2)) + 1);
  EXPECT_EQ(ages.counts()[EvictionAges::kBuckets - 1], 2);
}

}  // namespace
}  // namespace heavywater
