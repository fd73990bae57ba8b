#include "cache_service/tier/range_allocator.h"

#include <gtest/gtest.h>

#include <random>
#include <utility>
#include <vector>

namespace heavywater {
namespace {

TEST(RangeAllocatorTest, GivesTheLowestRunThatIsLongEnough) {
  RangeAllocator allocator(10);
  EXPECT_EQ(allocator.Allocate(2), 0);
  EXPECT_EQ(allocator.Allocate(3), 2);
  EXPECT_EQ(allocator.Allocate(1), 5);
  allocator.Free(0, 2);
  EXPECT_EQ(allocator.Allocate(3), 6) << "a hole of 2 is too short";
  EXPECT_EQ(allocator.Allocate(1), 0);
}

TEST(RangeAllocatorTest, RefusesWhatDoesNotFitAndChangesNothing) {
  RangeAllocator allocator(4);
  EXPECT_EQ(allocator.Allocate(5), std::nullopt);
  EXPECT_EQ(allocator.free_units(), 4);
  EXPECT_EQ(allocator.Allocate(4), 0);
  EXPECT_EQ(allocator.Allocate(1), std::nullopt);
}

TEST(RangeAllocatorTest, FreedNeighboursBecomeOneRunAgain) {
  RangeAllocator allocator(9);
  for (int i = 0; i < 3; ++i) ASSERT_EQ(allocator.Allocate(3), 3 * i);
  allocator.Free(0, 3);
  allocator.Free(6, 3);
  allocator.Free(3, 3);
  EXPECT_EQ(allocator.Allocate(9), 0);
}

TEST(RangeAllocatorTest, RunsNeverOverlapAndUnitsAlwaysBalance) {
  constexpr int kUnits = 200;
  for (uint32_t seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    RangeAllocator allocator(kUnits);
    std::vector<bool> used(kUnits, false);
    std::vector<std::pair<int64_t, int64_t>> runs;
    for (int step = 0; step < 2000; ++step) {
      if (random() % 2 == 0 || runs.empty()) {
        const int64_t units = 1 + random() % 7;
        const auto first = allocator.Allocate(units);
        if (!first.has_value()) continue;
        for (int64_t unit = *first; unit < *first + units; ++unit) {
          ASSERT_FALSE(used[unit]);
          used[unit] = true;
        }
        runs.emplace_back(*first, units);
      } else {
        std::swap(runs[random() % runs.size()], runs.back());
        const auto [first, units] = runs.back();
        runs.pop_back();
        allocator.Free(first, units);
        std::fill_n(used.begin() + first, units, false);
      }
      ASSERT_EQ(allocator.used_units(), std::count(used.begin(), used.end(), true));
      ASSERT_EQ(allocator.used_units() + allocator.free_units(), kUnits);
    }
  }
}

TEST(RangeAllocatorDeathTest, FreeingTwiceIsABug) {
  RangeAllocator allocator(4);
  ASSERT_EQ(allocator.Allocate(2), 0);
  allocator.Free(0, 2);
  EXPECT_DEATH(allocator.Free(0, 2), "CHECK failed");
}

}  // namespace
}  // namespace heavywater
