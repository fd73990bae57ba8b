// A short slice of what heavywater-sim runs for hours.
#include "tests/sim/system/system_simulation.h"

#include <map>
#include <string>

#include "gtest/gtest.h"

namespace heavywater {
namespace {

constexpr int kSeeds = 24;
constexpr int kSteps = 400;

TEST(SystemSimulationTest, EverythingHoldsAfterEveryStep) {
  std::map<std::string, int64_t, std::less<>> counts;
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    SystemSimulation simulation(seed);
    ASSERT_EQ(simulation.Run(kSteps), "") << "seed " << seed;
    for (const auto& [kind, count] : simulation.trace().counts()) counts[kind] += count;
  }
  // All that the simulation is there for has happened.
  for (const char* kind : {"crash of a rank",
                           "crash of the cache service",
                           "crash of the cache service within a call",
                           "the group has formed",
                           "a rank is cut off",
                           "a tier is away",
                           "a tier is full",
                           "a page is lost",
                           "restored",
                           "computed anew",
                           "the same again",
                           "turn",
                           "turn cancelled before the ranks",
                           "cancelled before its prompt",
                           "leaves the ranks, suspended",
                           "suspend: OK",
                           "truncate: OK",
                           "close: OK",
                           "fence",
                           "orphan",
                           "pages held by a rank",
                           "pages skipped",
                           "open: RESOURCE_EXHAUSTED"}) {
    EXPECT_GT(counts[kind], 0) << kind;
  }
}

// Of 10,000 the one in which a process that had been replaced wrote into what its successor read.
TEST(SystemSimulationTest, WhoWakesAfterItWasReplacedChangesNothing) {
  SystemSimulation simulation(2069);
  EXPECT_EQ(simulation.Run(500), "");
  EXPECT_GT(simulation.trace().counts().at("a row of a process that was replaced"), 0);
}

TEST(SystemSimulationTest, TheSameSeedIsTheSameRun) {
  for (const uint64_t seed : {3, 7, 11}) {
    SystemSimulation first(seed);
    EXPECT_EQ(first.Run(200), "");
    SystemSimulation second(seed);
    EXPECT_EQ(second.Run(200), "");
    EXPECT_EQ(first.trace().hash(), second.trace().hash()) << "seed " << seed;
    SystemSimulation other(seed + 1);
    EXPECT_EQ(other.Run(200), "");
    EXPECT_NE(first.trace().hash(), other.trace().hash()) << "seed " << seed;
  }
}

}  // namespace
}  // namespace heavywater
