// HEAVYWATER_SIM_SEEDS=N runs N seeds instead of the short slice,
// HEAVYWATER_SIM_FIRST_SEED=S starts at S: a failure prints its seed.
#include "tests/sim/rank_simulation.h"

#include <cstdio>
#include <cstdlib>
#include <string>

#include "gtest/gtest.h"

namespace heavywater {
namespace {

constexpr int kShortSlice = 60;
constexpr int kSteps = 80;

int FromEnvironment(const char* name, int otherwise) {
  const char* value = std::getenv(name);
  return value == nullptr ? otherwise : std::atoi(value);
}

TEST(RankSimulationTest, EverythingHoldsAfterEveryStep) {
  const int first = FromEnvironment("HEAVYWATER_SIM_FIRST_SEED", 0);
  const int seeds = FromEnvironment("HEAVYWATER_SIM_SEEDS", kShortSlice);
  SimulationCounts counts;
  for (int seed = first; seed < first + seeds; ++seed) {
    RankSimulation simulation(static_cast<uint32_t>(seed));
    ASSERT_EQ(simulation.Run(kSteps), "") << "seed " << seed;
    counts.Add(simulation.counts());
  }
  std::printf(
      "%ld steps, %ld sequences, %ld refused, %ld tokens, %ld items failed by faults, %ld stopped "
      "by full host memory, %ld demoted rows compared, %ld dropped, %ld recalled, %ld promoted\n",
      static_cast<long>(counts.steps), static_cast<long>(counts.joined),
      static_cast<long>(counts.refused), static_cast<long>(counts.tokens),
      static_cast<long>(counts.failed_items), static_cast<long>(counts.host_full_stops),
      static_cast<long>(counts.demoted_rows), static_cast<long>(counts.dropped),
      static_cast<long>(counts.recalled), static_cast<long>(counts.promoted));
  if (seeds < kShortSlice) return;
  // All that the simulation is there for has happened.
  EXPECT_GT(counts.refused, 0);
  EXPECT_GT(counts.failed_items, 0);
  EXPECT_GT(counts.host_full_stops, 0);
  EXPECT_GT(counts.lost, 0);
  EXPECT_GT(counts.demoted_rows, 10000);
  EXPECT_GT(counts.dropped, 0);
  EXPECT_GT(counts.recalled, 10000);
  EXPECT_GT(counts.promoted, 100);
}

}  // namespace
}  // namespace heavywater
