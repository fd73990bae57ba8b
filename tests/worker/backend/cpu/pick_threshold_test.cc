#include "worker/backend/cpu/pick_threshold.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

namespace heavywater {
namespace {

std::vector<float> RandomShares(std::mt19937& rng, int count) {
  std::lognormal_distribution<float> shares(-7, 3);
  std::vector<float> values(count);
  for (float& value : values) value = shares(rng);
  return values;
}

TEST(PickThresholdTest, TheWantedBestAlwaysReachTheBoundAndFewOthersDo) {
  std::mt19937 rng(7);
  PickThreshold threshold;
  for (int round = 0; round < 100; ++round) {
    const int wanted = 1 + static_cast<int>(rng() % 100);
    threshold.Start(wanted, 1e-4f);
    std::vector<float> seen;
    for (const float value : RandomShares(rng, 1000)) {
      if (threshold.Count(value)) {
        seen.push_back(value);
      } else {
        EXPECT_LT(value, threshold.least());
      }
      if (static_cast<int>(seen.size()) < wanted) {
        EXPECT_EQ(threshold.least(), 1e-4f) << "fewer than are wanted have come";
        continue;
      }
      std::nth_element(seen.begin(), seen.begin() + wanted - 1, seen.end(), std::greater<>());
      const float last = seen[wanted - 1];
      ASSERT_GE(last, threshold.least()) << "round " << round;
      ASSERT_LT(last, threshold.least() * 1.07f) << "a bucket is a sixteenth of its power of two";
    }
  }
}

TEST(PickThresholdTest, AValueBelowTheRisenBoundChangesNothing) {
  PickThreshold threshold;
  threshold.Start(2, 0.001f);
  EXPECT_TRUE(threshold.Count(0.5f));
  EXPECT_TRUE(threshold.Count(0.5f));
  ASSERT_EQ(threshold.least(), 0.5f);
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(threshold.Count(0.01f));
  EXPECT_EQ(threshold.least(), 0.5f);
  EXPECT_TRUE(threshold.Count(0.75f));
  EXPECT_EQ(threshold.least(), 0.5f) << "one above it is not two";
  EXPECT_TRUE(threshold.Count(0.75f));
  EXPECT_EQ(threshold.least(), 0.75f);
}

TEST(PickThresholdTest, StartForgetsWhatWasCounted) {
  PickThreshold threshold;
  threshold.Start(1, 1e-6f);
  EXPECT_TRUE(threshold.Count(1e30f));
  EXPECT_TRUE(threshold.Count(2e30f));
  threshold.Start(2, 1e-6f);
  EXPECT_TRUE(threshold.Count(1e-3f));
  EXPECT_EQ(threshold.least(), 1e-6f);
}

}  // namespace
}  // namespace heavywater
