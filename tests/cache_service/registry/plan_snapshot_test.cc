// Which states of a sequence are kept, for a group to go on from.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/registry/plan_state.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::PlanReport Report(int64_t plan, int64_t tokens_seen, uint64_t hash, int64_t watermark) {
  v1::PlanReport report;
  report.set_sequence_id(7);
  report.set_plan(plan);
  report.set_tokens_seen(tokens_seen);
  report.set_hash(hash);
  report.set_watermark(watermark);
  return report;
}

class PlanSnapshotTest : public ::testing::Test {
 protected:
  void Apply(int rank, const v1::PlanReport& report) {
    ASSERT_TRUE(state_.Validate(rank, report).ok()) << state_.Validate(rank, report);
    state_.Apply(rank, report);
    Advance();
  }
  void Advance() {
    state_.Advance([this](int rank) { return stored_[rank]; });
  }
  PlanState state_{PlanLayout{
      .sequence = 7, .num_ranks = 2, .num_layers = 2, .num_kv_heads = 2, .max_tokens = 100}};
  // The tier's own watermark of each rank; none: it writes no pages.
  std::optional<int64_t> stored_[2];
};

v1::PlanReport WithSnapshot(v1::PlanReport report, const std::string& data, int64_t total = 0,
                            int64_t offset = 0) {
  report.mutable_snapshot()->set_data(data);
  report.mutable_snapshot()->set_offset(offset);
  report.mutable_snapshot()->set_total_bytes(total == 0 ? static_cast<int64_t>(data.size())
                                                        : total);
  return report;
}

TEST_F(PlanSnapshotTest, ASnapshotIsKeptOnceAllRanksHaveReportedTheirPartAndItsTokensAreStored) {
  stored_[0] = 10;
  stored_[1] = 9;
  Apply(0, WithSnapshot(Report(1, 10, 1, 0), "zero"));
  Apply(1, WithSnapshot(Report(1, 10, 1, 0), "one"));
  EXPECT_EQ(state_.FindSnapshot(100), nullptr);
  stored_[1] = 10;
  Advance();
  ASSERT_NE(state_.FindSnapshot(100), nullptr);
  EXPECT_THAT(state_.FindSnapshot(100)->parts, ElementsAre("zero", "one"));
  EXPECT_EQ(state_.FindSnapshot(9), nullptr);
}

TEST_F(PlanSnapshotTest, ASnapshotWithADroppedPositionOrWithoutARankIsNotKept) {
  v1::PlanReport dropped = WithSnapshot(Report(1, 10, 1, 10), "one");
  dropped.add_dropped_ranges(3);
  dropped.add_dropped_ranges(4);
  Apply(0, WithSnapshot(Report(1, 10, 1, 10), "zero"));
  Apply(1, dropped);
  Apply(0, WithSnapshot(Report(2, 11, 2, 11), "zero"));
  Apply(1, Report(2, 11, 2, 11));
  EXPECT_EQ(state_.FindSnapshot(100), nullptr);
}

TEST_F(PlanSnapshotTest, PartsOfASnapshotAreJoinedAndAGapLeavesItIncomplete) {
  Apply(1, WithSnapshot(Report(1, 10, 1, 10), "one"));
  Apply(0, WithSnapshot(Report(1, 10, 1, 10), "ro", 4, 2));
  EXPECT_EQ(state_.FindSnapshot(100), nullptr);
  Apply(0, WithSnapshot(Report(1, 10, 1, 10), "ze", 4, 0));
  EXPECT_EQ(state_.FindSnapshot(100), nullptr);
  Apply(0, WithSnapshot(Report(1, 10, 1, 10), "ro", 4, 2));
  ASSERT_NE(state_.FindSnapshot(100), nullptr);
  EXPECT_THAT(state_.FindSnapshot(100)->parts, ElementsAre("zero", "one"));
}

TEST_F(PlanSnapshotTest, TheFirstAndTheLastTwoSnapshotsAreKept) {
  for (int plan = 1; plan <= 6; ++plan) {
    for (int rank = 0; rank < 2; ++rank) {
      Apply(rank, WithSnapshot(Report(plan, 10 * plan, 1, 10 * plan), absl::StrCat(plan, rank)));
    }
  }
  EXPECT_EQ(state_.FindSnapshot(9), nullptr);
  EXPECT_EQ(state_.FindSnapshot(49)->plan, 1);
  EXPECT_EQ(state_.FindSnapshot(59)->plan, 5);
  EXPECT_EQ(state_.FindSnapshot(100)->plan, 6);
}

TEST_F(PlanSnapshotTest, TruncateForgetsWhatCameLaterAndKeepsWhoHasFinished) {
  for (int plan = 1; plan <= 3; ++plan) {
    v1::PlanReport report = WithSnapshot(Report(plan, 10 * plan, 1, 10 * plan), "zero");
    report.set_first_token(10 * (plan - 1));
    for (int i = 0; i < 10; ++i) report.add_tokens(plan);
    report.set_finished(plan == 3);
    Apply(0, report);
    Apply(1, WithSnapshot(Report(plan, 10 * plan, 1, 10 * plan), "one"));
  }
  state_.Truncate(2, 25);
  EXPECT_EQ(state_.tokens().size(), 25u);
  EXPECT_EQ(state_.FindSnapshot(100)->plan, 2);
  EXPECT_TRUE(state_.finished(0));
}

TEST_F(PlanSnapshotTest, RanksGoBackToASnapshot) {
  for (int plan = 1; plan <= 3; ++plan) {
    for (int rank = 0; rank < 2; ++rank) {
      Apply(rank, WithSnapshot(Report(plan, 10 * plan, 1, 10 * plan), absl::StrCat(plan, rank)));
    }
  }
  v1::PlanReport last = Report(4, 40, 1, 40);
  last.set_finished(true);
  Apply(0, last);
  state_.GoBackTo(2, 20);
  EXPECT_FALSE(state_.finished(0));
  EXPECT_EQ(state_.FindSnapshot(100)->plan, 2);
  EXPECT_EQ(state_.SnapshotOfPlan(3), nullptr);
  // What is reported again counts again.
  for (int rank = 0; rank < 2; ++rank) {
    Apply(rank, WithSnapshot(Report(3, 30, 1, 30), absl::StrCat("again", rank)));
  }
  EXPECT_THAT(state_.FindSnapshot(100)->parts, ElementsAre("again0", "again1"));
}

v1::PlanReport WithSets(v1::PlanReport report) {
  for (int layer = 0; layer < 2; ++layer) {
    v1::ReportedSet& set = *report.add_sets();
    set.set_layer(layer);
    set.set_kv_head(-1);
    set.add_positions(layer);
  }
  return report;
}

TEST_F(PlanSnapshotTest, GoingBackForgetsTheTokensAndTheCommittedPlanThatCameLater) {
  for (int plan = 1; plan <= 2; ++plan) {
    Apply(1, WithSnapshot(Report(plan, 10 * plan, 1, 10 * plan), "one"));
    v1::PlanReport report = WithSets(WithSnapshot(Report(plan, 10 * plan, 1, 10 * plan), "zero"));
    report.set_first_token(10 * (plan - 1));
    for (int i = 0; i < 10; ++i) report.add_tokens(plan);
    Apply(0, report);
  }
  ASSERT_EQ(state_.committed()->number, 2);
  ASSERT_EQ(state_.tokens().size(), 20u);
  state_.GoBackTo(1, 12);
  EXPECT_EQ(state_.committed(), nullptr);
  EXPECT_EQ(state_.tokens().size(), 12u);
  // Plan 2 again, with other tokens.
  v1::PlanReport report = WithSets(WithSnapshot(Report(2, 15, 9, 15), "again"));
  report.set_first_token(12);
  report.add_tokens(8);
  Apply(0, report);
  Apply(1, WithSnapshot(Report(2, 15, 9, 15), "again"));
  ASSERT_NE(state_.committed(), nullptr);
  EXPECT_EQ(state_.committed()->tokens_seen, 15);
  EXPECT_EQ(state_.tokens().back(), 8);
  EXPECT_EQ(state_.FindSnapshot(100)->plan, 2);
}

TEST_F(PlanSnapshotTest, SetsThatCompleteAPlanDoNotEndASnapshotThatIsStillComing) {
  Apply(1, WithSnapshot(Report(1, 10, 1, 10), "on", 3, 0));
  Apply(0, WithSets(WithSnapshot(Report(1, 10, 1, 10), "zero")));
  EXPECT_EQ(state_.committed(), nullptr);
  Apply(1, WithSnapshot(Report(1, 10, 1, 10), "e", 3, 2));
  ASSERT_NE(state_.FindSnapshot(100), nullptr);
  EXPECT_THAT(state_.FindSnapshot(100)->parts, ElementsAre("zero", "one"));
  ASSERT_NE(state_.committed(), nullptr);
  EXPECT_EQ(state_.committed()->number, 1);
}

TEST_F(PlanSnapshotTest, ASnapshotThatDoesNotFitItsSizeIsRefusedNamingTheField) {
  for (const v1::PlanReport& bad :
       {WithSnapshot(Report(1, 10, 1, 0), "abc", 2), WithSnapshot(Report(1, 10, 1, 0), "abc", 4, 2),
        WithSnapshot(Report(1, 10, 1, 0), "a", int64_t{1} << 40)}) {
    EXPECT_THAT(std::string(state_.Validate(0, bad).message()), HasSubstr("snapshot."));
  }
}

}  // namespace
}  // namespace heavywater
