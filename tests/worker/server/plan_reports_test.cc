// How states are numbered in reports.
#include "worker/server/plan_reports.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "tests/worker/rank/test_group.h"

namespace heavywater {
namespace {

constexpr SequenceId kSequence = 3;

class PlanReportsTest : public ::testing::Test {
 protected:
  void Open(Policy policy, int interval) {
    SequenceOptions options = TestSequence(policy, Scope::kLayer, 8, 8, 20);
    options.policy.plan_interval_steps = interval;
    ASSERT_TRUE(group_.OpenAndRunPrompt(kSequence, options, TestTokens(1, 20)).ok());
  }
  void Append() { ASSERT_TRUE(group_.Append({{kSequence, TestTokens(1, 1, seen_++)}}).ok()); }
  int64_t Report(bool with_sets) { return *reports_.Report(kSequence, with_sets); }

  TestGroup group_{TestGroupOptions()};
  int64_t seen_ = 20;
  std::vector<v1::PlanReport> pushed_;
  PlanReports reports_{
      group_.cache(), [this](QueuedReport report) { pushed_.push_back(std::move(report.report)); }};
};

TEST_F(PlanReportsTest, AStateWithTokensSinceTheLastCountsAsOneMore) {
  Open(Policy::kFull, 1);
  EXPECT_EQ(Report(true), 1);
  Append();
  EXPECT_EQ(Report(false), 2);
  Append();
  EXPECT_EQ(Report(true), 3);
}

TEST_F(PlanReportsTest, TheSameStateKeepsItsNumberSoThatItsSetsMayFollow) {
  Open(Policy::kFull, 1);  // never plans: its plan number stays that of the prompt
  EXPECT_EQ(Report(true), 1);
  Append();
  EXPECT_EQ(Report(false), 2);
  EXPECT_EQ(Report(true), 2);
  ASSERT_EQ(pushed_.size(), 3u);
  EXPECT_EQ(pushed_[2].plan(), 2);
  EXPECT_EQ(pushed_[2].tokens_seen(), 21);
  EXPECT_GT(pushed_[2].sets_size(), 0);
}

TEST_F(PlanReportsTest, PlansGoOnFromThatOfARestoredState) {
  Open(Policy::kSnapKvH2o, 1);
  reports_.Resume(kSequence, 7, 20, 2);
  Append();
  EXPECT_EQ(Report(false), 8);
  EXPECT_EQ(pushed_[0].incarnation(), 2);
  reports_.Close(kSequence)();
  EXPECT_TRUE(pushed_[1].finished());
  EXPECT_EQ(pushed_[1].plan(), 8);
}

}  // namespace
}  // namespace heavywater
