#include "cache_service/base/step_phases.h"

#include <numeric>
#include <set>
#include <string_view>
#include <thread>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

constexpr int64_t kMs = 1'000'000;  // nanoseconds

void Sleep() { absl::SleepFor(absl::Milliseconds(20)); }

int64_t Of(const StepPhaseTimes& times, StepPhase phase) {
  return times[static_cast<size_t>(phase)];
}

int64_t Sum(const StepPhaseTimes& times) {
  return std::accumulate(times.begin(), times.end(), int64_t{0});
}

TEST(StepPhasesTest, AScopeWithinAScopeTakesItsTimeFromIt) {
  TakeStepPhaseTimes();
  const absl::Time start = absl::Now();
  {
    const StepPhaseScope outer(StepPhase::kMatrices);
    Sleep();
    {
      const StepPhaseScope inner(StepPhase::kReduce);
      Sleep();
    }
    Sleep();
  }
  const int64_t passed = absl::ToInt64Nanoseconds(absl::Now() - start);
  const StepPhaseTimes times = TakeStepPhaseTimes();
  EXPECT_GE(Of(times, StepPhase::kMatrices), 40 * kMs);
  EXPECT_GE(Of(times, StepPhase::kReduce), 20 * kMs);
  EXPECT_LE(Sum(times), passed + kMs);  // nothing counts twice
}

TEST(StepPhasesTest, TimeOutsideOfStepsIsNotAccountedFor) {
  TakeStepPhaseTimes();
  { const StepPhaseScope step(StepPhase::kOther); }
  TakeStepPhaseTimes();
  Sleep();
  EXPECT_EQ(Sum(TakeStepPhaseTimes()), 0);
}

TEST(StepPhasesTest, TimesAreTakenOnceAndAScopeGoesOnAfterwards) {
  TakeStepPhaseTimes();
  const StepPhaseScope step(StepPhase::kPlan);
  Sleep();
  EXPECT_GE(Of(TakeStepPhaseTimes(), StepPhase::kPlan), 20 * kMs);
  EXPECT_LT(Of(TakeStepPhaseTimes(), StepPhase::kPlan), 20 * kMs);
  Sleep();
  EXPECT_GE(Of(TakeStepPhaseTimes(), StepPhase::kPlan), 20 * kMs);
}

TEST(StepPhasesTest, EveryThreadHasItsOwnAccount) {
  TakeStepPhaseTimes();
  int64_t other = 0;
  std::thread([&] {
    {
      const StepPhaseScope step(StepPhase::kReport);
      Sleep();
    }
    other = Of(TakeStepPhaseTimes(), StepPhase::kReport);
  }).join();
  EXPECT_GE(other, 20 * kMs);
  EXPECT_EQ(Sum(TakeStepPhaseTimes()), 0);
}

TEST(StepPhasesTest, NamesDiffer) {
  std::set<std::string_view> names;
  for (int i = 0; i < kNumStepPhases; ++i) {
    names.insert(StepPhaseName(static_cast<StepPhase>(i)));
  }
  EXPECT_EQ(names.size(), static_cast<size_t>(kNumStepPhases));
  EXPECT_FALSE(names.contains("unknown"));
}

}  // namespace
}  // namespace heavywater
