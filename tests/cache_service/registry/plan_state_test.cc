#include "cache_service/registry/plan_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>

#include "cache_service/registry/plan_sets.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

const PlanLayout kLayout = {.sequence = 7,
                            .num_ranks = 2,
                            .num_layers = 2,
                            .num_kv_heads = 2,
                            .per_kv_head = false,
                            .max_tokens = 100};

v1::PlanReport Report(int64_t plan, int64_t tokens_seen, uint64_t hash, int64_t watermark) {
  v1::PlanReport report;
  report.set_sequence_id(7);
  report.set_plan(plan);
  report.set_tokens_seen(tokens_seen);
  report.set_hash(hash);
  report.set_watermark(watermark);
  return report;
}

void AddSet(v1::PlanReport& report, int layer, int kv_head, std::vector<int32_t> positions,
            std::vector<int64_t> scores = {}) {
  v1::ReportedSet& set = *report.add_sets();
  set.set_layer(layer);
  set.set_kv_head(kv_head);
  set.mutable_positions()->Add(positions.begin(), positions.end());
  set.mutable_scores()->Add(scores.begin(), scores.end());
}

v1::PlanReport WithSets(v1::PlanReport report, std::vector<int32_t> positions) {
  for (int layer = 0; layer < 2; ++layer) AddSet(report, layer, -1, positions);
  return report;
}

// Of ranks that write no pages.
std::optional<int64_t> NoPages(int) { return std::nullopt; }

class PlanStateTest : public ::testing::Test {
 protected:
  void Apply(int rank, const v1::PlanReport& report) {
    ASSERT_TRUE(state_.Validate(rank, report).ok()) << state_.Validate(rank, report);
    state_.Apply(rank, report);
    Advance();
  }
  void Advance() {
    state_.Advance([this](int rank) { return stored_[rank]; });
  }
  int64_t CommittedPlan() const {
    return state_.committed() == nullptr ? 0 : state_.committed()->number;
  }
  PlanState state_{kLayout};
  // The tier's own watermark of each rank; none: it writes no pages.
  std::optional<int64_t> stored_[2];
};

TEST_F(PlanStateTest, APlanIsCommittedWhenAllRanksReportedItWithTheSameHash) {
  Apply(0, WithSets(Report(1, 10, 0xabc, 10), {0, 1, 9}));
  EXPECT_EQ(CommittedPlan(), 0);
  Apply(1, Report(1, 10, 0xabc, 10));
  ASSERT_EQ(CommittedPlan(), 1);
  EXPECT_EQ(state_.committed()->tokens_seen, 10);
}

TEST_F(PlanStateTest, NotBeforeItsTokensLieBelowEveryWatermark) {
  Apply(0, WithSets(Report(1, 10, 1, 10), {0}));
  Apply(1, Report(1, 10, 1, 9));
  EXPECT_EQ(CommittedPlan(), 0);
  stored_[1] = 10;
  Advance();
  EXPECT_EQ(CommittedPlan(), 1) << "without another report";
}

TEST_F(PlanStateTest, OfARankWithPagesTheTierDecidesHowFarTheyHaveArrived) {
  stored_[1] = 9;
  Apply(0, WithSets(Report(1, 10, 1, 10), {0}));
  Apply(1, Report(1, 10, 1, 10));
  EXPECT_EQ(CommittedPlan(), 0) << "position 9 cannot be read yet, whatever the rank says";
  stored_[1] = 10;
  Advance();
  EXPECT_EQ(CommittedPlan(), 1);
}

TEST_F(PlanStateTest, WhatARankHasGivenUpHoldsNothingBack) {
  stored_[0] = 12;
  stored_[1] = 4;
  Apply(0, WithSets(Report(1, 12, 1, 0), {0}));
  v1::PlanReport report = Report(1, 12, 1, 0);
  for (const int64_t number : {4, 8}) report.add_dropped_ranges(number);
  Apply(1, report);
  EXPECT_EQ(CommittedPlan(), 0) << "positions 8 to 11 are still to come";
  stored_[1] = 8;
  Advance();
  EXPECT_EQ(CommittedPlan(), 0);
  stored_[1] = 12;
  Advance();
  EXPECT_EQ(CommittedPlan(), 1);
  // Cut off from the tier: all that follows is dropped.
  stored_[0] = 13;
  Apply(0, WithSets(Report(2, 13, 2, 0), {0}));
  report = Report(2, 13, 2, 0);
  for (const int64_t number : {0, 13}) report.add_dropped_ranges(number);
  Apply(1, report);
  EXPECT_EQ(CommittedPlan(), 2);
}

TEST_F(PlanStateTest, ALaterReportsWatermarkCommitsAnEarlierPlan) {
  Apply(0, WithSets(Report(1, 10, 1, 10), {0}));
  Apply(1, Report(1, 10, 1, 0));
  Apply(1, Report(2, 11, 2, 10));
  EXPECT_EQ(CommittedPlan(), 1);
}

TEST_F(PlanStateTest, NotBeforeItsSetsAreKnown) {
  Apply(0, WithSets(Report(1, 10, 1, 99), {0}));
  Apply(1, Report(1, 10, 1, 99));
  for (int64_t plan = 2; plan <= 16; ++plan) {
    for (int rank = 0; rank < 2; ++rank) Apply(rank, Report(plan, 9 + plan, plan, 99));
  }
  EXPECT_EQ(CommittedPlan(), 1) << "plans with hashes only";
  Apply(0, WithSets(Report(17, 26, 17, 99), {0}));
  Apply(1, Report(17, 26, 17, 99));
  EXPECT_EQ(CommittedPlan(), 17);
}

TEST_F(PlanStateTest, SetsMayComeInSeveralReportsOfTheSamePlan) {
  Apply(1, Report(1, 10, 1, 10));
  v1::PlanReport first = Report(1, 10, 1, 10);
  AddSet(first, 0, -1, {0, 9});
  Apply(0, first);
  EXPECT_EQ(CommittedPlan(), 0);
  v1::PlanReport second = Report(1, 10, 1, 10);
  AddSet(second, 1, -1, {1, 9});
  Apply(0, second);
  ASSERT_EQ(CommittedPlan(), 1);
  EXPECT_THAT(state_.committed()->sets.at({1, -1}).positions, ElementsAre(1, 9));
}

TEST_F(PlanStateTest, ReplaysAreIgnored) {
  Apply(0, WithSets(Report(1, 10, 1, 10), {0}));
  Apply(0, WithSets(Report(2, 11, 2, 11), {1}));
  Apply(0, WithSets(Report(1, 10, 1, 10), {5}));
  Apply(1, Report(1, 10, 1, 10));
  ASSERT_EQ(CommittedPlan(), 1);
  EXPECT_THAT(state_.committed()->sets.at({0, -1}).positions, ElementsAre(0));
  Apply(1, Report(1, 10, 99, 10));
  EXPECT_TRUE(state_.agreement().ok()) << "a plan that is committed is not judged again";
}

TEST_F(PlanStateTest, ADifferentHashNamesBothRanksAndValuesAndCommitsNothingMore) {
  Apply(0, WithSets(Report(1, 10, 1, 99), {0}));
  Apply(1, Report(1, 10, 1, 99));
  Apply(1, Report(2, 11, 77, 99));
  Apply(0, WithSets(Report(2, 11, 66, 99), {0}));
  EXPECT_EQ(state_.agreement().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(state_.agreement().message()),
              AllOf(HasSubstr("plan 2 of sequence 7"), HasSubstr("77 on rank 1"),
                    HasSubstr("66 on rank 0")));
  Apply(0, WithSets(Report(3, 12, 3, 99), {0}));
  Apply(1, Report(3, 12, 3, 99));
  EXPECT_EQ(CommittedPlan(), 1);
}

TEST_F(PlanStateTest, TokensSeenMustAgreeAsWell) {
  Apply(0, Report(1, 10, 1, 10));
  Apply(1, Report(1, 11, 1, 11));
  EXPECT_THAT(std::string(state_.agreement().message()),
              AllOf(HasSubstr("tokens_seen is 10 on rank 0"), HasSubstr("11 on rank 1")));
}

TEST_F(PlanStateTest, PlansThatNeverCompleteAreBounded) {
  for (int64_t plan = 1; plan <= 2000; ++plan) {
    Apply(0, WithSets(Report(plan, 50, plan, 50), {0}));
  }
  Apply(1, Report(1, 50, 1, 50));
  EXPECT_EQ(CommittedPlan(), 0) << "the oldest plans have been forgotten";
  Apply(1, Report(2000, 50, 2000, 50));
  EXPECT_EQ(CommittedPlan(), 2000);
}

v1::ReportedSet& AddPart(v1::PlanReport& report, int layer, std::vector<int32_t> positions,
                         int64_t first_index, int64_t num_positions) {
  AddSet(report, layer, -1, positions);
  v1::ReportedSet& set = *report.mutable_sets()->rbegin();
  set.set_first_index(first_index);
  set.set_num_positions(num_positions);
  return set;
}

TEST_F(PlanStateTest, ASetInPartsIsCommittedWhenItIsWhole) {
  v1::PlanReport first = Report(1, 10, 5, 10);
  AddPart(first, 0, {0, 1}, 0, 2);
  AddPart(first, 1, {0, 3}, 0, 5);
  v1::PlanReport second = Report(1, 10, 5, 10);
  AddPart(second, 1, {4, 5}, 2, 5);
  v1::PlanReport third = Report(1, 10, 5, 10);
  AddPart(third, 1, {9}, 4, 5);
  Apply(1, Report(1, 10, 5, 10));
  Apply(0, first);
  Apply(0, third);
  EXPECT_EQ(CommittedPlan(), 0) << "a part is missing";
  // The reporter sends all of them again.
  Apply(0, first);
  Apply(0, second);
  Apply(0, second);
  EXPECT_EQ(CommittedPlan(), 0);
  Apply(0, third);
  ASSERT_EQ(CommittedPlan(), 1);
  EXPECT_THAT(state_.committed()->sets.at({1, -1}).positions, ElementsAre(0, 3, 4, 5, 9));
  EXPECT_EQ(state_.committed()->sets.at({1, -1}).scores.size(), 5u);
}

TEST_F(PlanStateTest, PartsThatDoNotAscendNeverMakeAWhole) {
  v1::PlanReport report = Report(1, 10, 5, 10);
  AddPart(report, 0, {0, 1}, 0, 2);
  AddPart(report, 1, {0, 3}, 0, 4);
  AddPart(report, 1, {3, 5}, 2, 4);
  Apply(1, Report(1, 10, 5, 10));
  Apply(0, report);
  EXPECT_EQ(CommittedPlan(), 0);
}

TEST(PlanStateMemoryTest, PlansThatNeverCompleteAreBoundedInBytesButForTheNewest) {
  constexpr int kTokens = 1'000'000;  // 12 MB a plan
  PlanState state({.sequence = 7, .num_ranks = 2, .num_layers = 2, .max_tokens = kTokens});
  std::vector<int32_t> positions(kTokens);
  for (int i = 0; i < kTokens; ++i) positions[static_cast<size_t>(i)] = i;
  for (int64_t plan = 1; plan <= 8; ++plan) {
    v1::PlanReport report = Report(plan, kTokens, 1, kTokens);
    AddSet(report, 0, -1, positions);
    state.Apply(0, report);
  }
  // The first has gone: reported by the other rank, and whole, it would commit.
  const auto commits = [&](int64_t plan) {
    v1::PlanReport report = Report(plan, kTokens, 1, kTokens);
    AddSet(report, 1, -1, {0});
    state.Apply(1, report);
    state.Advance(NoPages);
    return state.committed() != nullptr && state.committed()->number == plan;
  };
  EXPECT_FALSE(commits(1));
  EXPECT_TRUE(commits(8));
}

TEST(PlanSetsTest, ASetThatExceedsAMessageIsCutAndJoinsToTheSame) {
  constexpr int kTokens = 300'000;
  PlanState state({.sequence = 1, .max_tokens = kTokens});
  v1::PlanReport report = Report(1, kTokens, 1, kTokens);
  std::vector<int32_t> positions;
  std::vector<int64_t> scores;
  for (int i = 0; i < kTokens; i += 2) {
    positions.push_back(i);
    scores.push_back(int64_t{i} << 32);
  }
  AddSet(report, 0, -1, positions, scores);
  state.Apply(0, report);
  state.Advance(NoPages);
  ASSERT_NE(state.committed(), nullptr);
  v1::ResolvedBudget budget;
  budget.set_sink_tokens(4);
  budget.set_recent_tokens(100'000);
  const auto messages = SplitSets(*state.committed(), budget, {});
  ASSERT_GT(messages.size(), 2u);
  v1::SequenceSet set = messages[0];
  for (size_t i = 0; i < messages.size(); ++i) {
    EXPECT_LE(messages[i].ByteSizeLong(), size_t{1} << 20);
    EXPECT_EQ(messages[i].continued(), i > 0);
    EXPECT_EQ(messages[i].tokens_seen(), kTokens);
    if (i > 0) set.MergeFrom(messages[i]);
  }
  EXPECT_EQ(set.sinks_size(), 2);
  EXPECT_EQ(set.recent_size(), 50'000);
  std::vector<int64_t> joined(set.sinks().begin(), set.sinks().end());
  joined.insert(joined.end(), set.heavy().begin(), set.heavy().end());
  joined.insert(joined.end(), set.recent().begin(), set.recent().end());
  EXPECT_EQ(joined, std::vector<int64_t>(positions.begin(), positions.end()));
  ASSERT_EQ(set.scores_size(), kTokens / 2);
  for (int i = 0; i < set.scores_size(); ++i) ASSERT_EQ(set.scores(i), 2 * i);
  EXPECT_EQ(set.demoted_ranges_size(), kTokens);
}

TEST_F(PlanStateTest, TokensContinueWithoutGaps) {
  v1::PlanReport report = Report(1, 10, 1, 10);
  for (const int token : {5, 6, 7}) report.add_tokens(token);
  Apply(0, report);
  report = Report(2, 12, 1, 10);
  report.set_first_token(2);
  for (const int token : {7, 8}) report.add_tokens(token);
  Apply(0, report);
  EXPECT_THAT(state_.tokens(), ElementsAre(5, 6, 7, 8));
  report.set_plan(3);
  report.set_first_token(9);
  Apply(0, report);
  EXPECT_THAT(state_.tokens(), ElementsAre(5, 6, 7, 8)) << "a lost report is a gap";
}

TEST_F(PlanStateTest, FinishedWhenAllRanksAre) {
  v1::PlanReport report = Report(1, 10, 1, 10);
  report.set_finished(true);
  Apply(1, report);
  EXPECT_FALSE(state_.all_finished());
  Apply(0, report);
  EXPECT_TRUE(state_.all_finished());
}

TEST_F(PlanStateTest, BadReportsNameTheField) {
  const auto expect = [&](const v1::PlanReport& report, const char* field, int rank = 0) {
    const absl::Status status = state_.Validate(rank, report);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << field;
    EXPECT_THAT(std::string(status.message()), HasSubstr(field));
  };
  expect(Report(1, 10, 1, 10), "rank", 2);
  expect(Report(0, 10, 1, 10), "plan");
  expect(Report(1, 101, 1, 10), "tokens_seen");
  expect(Report(1, 10, 1, 101), "watermark");
  expect(WithSets(Report(1, 10, 1, 10), {3, 3}), "sets.positions");
  expect(WithSets(Report(1, 10, 1, 10), {10}), "sets.positions");
  expect(WithSets(Report(1, 10, 1, 10), {-1}), "sets.positions");
  v1::PlanReport report = Report(1, 10, 1, 10);
  AddSet(report, 2, -1, {0});
  expect(report, "sets.layer");
  report = Report(1, 10, 1, 10);
  AddSet(report, 0, 0, {0});
  expect(report, "sets.kv_head");
  report = Report(1, 10, 1, 10);
  AddSet(report, 0, -1, {0, 1}, {1});
  expect(report, "sets.scores");
  report = Report(1, 10, 1, 10);
  report.add_dropped_ranges(1);
  expect(report, "dropped_ranges");
  report = Report(1, 10, 1, 10);
  report.add_tokens(-1);
  expect(report, "tokens is -1");
  report = Report(1, 10, 1, 10);
  AddPart(report, 0, {0, 1}, 1, 0);
  expect(report, "sets.first_index is 1");
  report = Report(1, 10, 1, 10);
  AddPart(report, 0, {0, 1}, 0, 1);
  expect(report, "num_positions");
  report = Report(1, 10, 1, 10);
  AddPart(report, 0, {0, 1}, 2, 3);
  expect(report, "sets.first_index is 2");
  report = Report(1, 10, 1, 10);
  report.set_first_token(100);
  report.add_tokens(1);
  expect(report, "first_token");
}

TEST(PlanSetsTest, ResidentDemotedAndDroppedAreDisjointAndHoldAllThatWasSeen) {
  PlanState state(kLayout);
  v1::PlanReport report = Report(1, 12, 5, 12);
  constexpr int64_t kOne = int64_t{1} << 32;
  AddSet(report, 0, -1, {0, 3, 6, 10, 11}, {kOne, kOne / 2, 3 * kOne, kOne / 4, 0});
  AddSet(report, 1, -1, {0, 1, 2, 10, 11});
  for (const int64_t number : {4, 8}) report.add_dropped_ranges(number);
  state.Apply(0, report);
  v1::PlanReport other = Report(1, 12, 5, 12);
  for (const int64_t number : {8, 9}) other.add_dropped_ranges(number);
  state.Apply(1, other);
  state.Advance(NoPages);
  ASSERT_NE(state.committed(), nullptr);

  v1::ResolvedBudget budget;
  budget.set_sink_tokens(1);
  budget.set_recent_tokens(2);
  const auto sets = SplitSets(*state.committed(), budget, {});
  ASSERT_EQ(sets.size(), 2u);
  EXPECT_EQ(sets[0].layer(), 0);
  EXPECT_EQ(sets[0].kv_head(), -1);
  EXPECT_EQ(sets[0].plan(), 1);
  EXPECT_EQ(sets[0].plan_hash(), 5u);
  EXPECT_THAT(sets[0].sinks(), ElementsAre(0));
  EXPECT_THAT(sets[0].heavy(), ElementsAre(3, 6));
  EXPECT_THAT(sets[0].recent(), ElementsAre(10, 11));
  EXPECT_THAT(sets[0].scores(), ElementsAre(1.0, 0.5, 3.0, 0.25, 0.0));
  EXPECT_THAT(sets[0].dropped_ranges(), ElementsAre(4, 6, 7, 9));
  EXPECT_THAT(sets[0].demoted_ranges(), ElementsAre(1, 3, 9, 10));
  const v1::SequenceCounts counts = CountSets(*state.committed());
  EXPECT_EQ(counts.tokens_seen(), 12);
  EXPECT_EQ(counts.tokens_resident(), 5);
  EXPECT_EQ(counts.tokens_resident() + counts.tokens_demoted() + counts.tokens_dropped(), 12);
}

TEST(PlanSetsTest, AnEarlySequenceHasNothingDemotedAndSinksComeBeforeRecent) {
  PlanState state({.sequence = 1, .max_tokens = 9});
  v1::PlanReport report = Report(1, 2, 5, 2);
  AddSet(report, 0, -1, {0, 1});
  state.Apply(0, report);
  state.Advance(NoPages);
  v1::ResolvedBudget budget;
  budget.set_sink_tokens(1);
  budget.set_recent_tokens(4);
  const auto sets = SplitSets(*state.committed(), budget, {});
  EXPECT_THAT(sets[0].sinks(), ElementsAre(0));
  EXPECT_THAT(sets[0].recent(), ElementsAre(1));
  EXPECT_TRUE(sets[0].demoted_ranges().empty());
}

TEST(PlanSetsTest, ALayerWithARecentOfItsOwnIsSplitThere) {
  v1::ResolvedBudget budget;
  budget.set_recent_tokens(2);
  budget.add_layer_recent_tokens(1);
  ReportedPlan plan;
  plan.tokens_seen = 4;
  for (int layer = 0; layer < 2; ++layer) {
    plan.sets[{layer, -1}] = {.positions = {0, 1, 2, 3}, .scores = {0, 0, 0, 0}};
  }
  const auto sets = SplitSets(plan, budget, {});
  ASSERT_EQ(sets.size(), 2u);
  EXPECT_EQ(sets[0].recent_size(), 1);  // its own
  EXPECT_EQ(sets[1].recent_size(), 2);  // of all
}

TEST(PlanSetsTest, InScopeKvHeadEachRankAnswersForItsOwnHeads) {
  PlanLayout layout = kLayout;
  layout.per_kv_head = true;
  PlanState state(layout);
  for (int rank = 0; rank < 2; ++rank) {
    v1::PlanReport report = Report(1, 4, /*hash=*/100 + rank, 4);
    for (int layer = 0; layer < 2; ++layer) AddSet(report, layer, rank, {3});
    if (rank == 1) {
      report.add_dropped_ranges(0);
      report.add_dropped_ranges(4);
    }
    ASSERT_TRUE(state.Validate(rank, report).ok());
    state.Apply(rank, report);
  }
  state.Advance(NoPages);
  ASSERT_TRUE(state.agreement().ok()) << "hashes of different heads differ";
  google::protobuf::RepeatedField<int32_t> layers;
  layers.Add(1);
  const auto sets = SplitSets(*state.committed(), {}, layers);
  ASSERT_EQ(sets.size(), 2u);
  EXPECT_EQ(sets[0].layer(), 1);
  EXPECT_EQ(sets[0].kv_head(), 0);
  EXPECT_THAT(sets[0].demoted_ranges(), ElementsAre(0, 3));
  EXPECT_TRUE(sets[0].dropped_ranges().empty());
  EXPECT_EQ(sets[1].kv_head(), 1);
  EXPECT_THAT(sets[1].dropped_ranges(), ElementsAre(0, 3)) << "position 3 is resident";
  EXPECT_TRUE(sets[1].demoted_ranges().empty());
}

TEST(PlanStateBoundsTest, DroppedRangesOfPendingPlansCountAgainstTheirBound) {
  constexpr int64_t kRanges = 1 << 20;  // 16 MiB of each plan; 64 MiB may be pending
  PlanState state({.sequence = 7, .num_ranks = 2, .max_tokens = 2 * kRanges});
  for (int64_t plan = 1; plan <= 8; ++plan) {
    v1::PlanReport report = Report(plan, 2 * kRanges, 1, 0);
    for (int64_t i = 0; i < kRanges; ++i) {
      report.add_dropped_ranges(2 * i);
      report.add_dropped_ranges(2 * i + 1);
    }
    ASSERT_TRUE(state.Validate(0, report).ok());
    state.Apply(0, report);
  }
  const v1::PlansState kept = state.ToRecord();
  EXPECT_EQ(kept.pending_size(), 4);
  EXPECT_EQ(kept.pending().rbegin()->number(), 8);
}

}  // namespace
}  // namespace heavywater
