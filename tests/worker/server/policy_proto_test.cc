#include "worker/server/policy_proto.h"

#include <string>

#include "gtest/gtest.h"

namespace heavywater {
namespace {

TEST(PolicyProtoTest, PolicyOptionsSurviveTheWayToOtherRanks) {
  v1::PolicyOptions proto;
  proto.set_policy("streaming");
  proto.set_scope("kv_head");
  proto.set_heavy_tokens(9);
  proto.set_recent_tokens(7);
  proto.set_sink_tokens(0);  // set, although 0: streaming's default is 4
  proto.set_decay(0.5);
  const auto options = PolicyFromProto(proto);
  ASSERT_TRUE(options.ok()) << options.status();
  const v1::PolicyOptions sent = PolicyToProto(*options);
  const auto received = PolicyFromProto(sent);
  ASSERT_TRUE(received.ok()) << received.status();
  EXPECT_EQ(PolicyToProto(*received).SerializeAsString(), sent.SerializeAsString());
  EXPECT_EQ(received->sink_tokens, 0);
  EXPECT_EQ(received->heavy_tokens, 9);
}

TEST(PolicyProtoTest, EveryOptionOfRecallSurvivesTheWayToOtherRanks) {
  // Each differs from the preset's default, 0 and false among them.
  v1::PolicyOptions proto;
  proto.set_policy("recall");
  proto.set_recall(true);
  proto.set_recall_all(true);
  proto.set_recall_tokens(7);
  proto.set_recall_min_share(0);
  proto.set_recall_wait(true);
  proto.set_sketch_channels(24);
  proto.set_promote_candidates(0);
  proto.set_device_ratio(0);
  proto.set_pooled_seeds(false);
  const auto options = PolicyFromProto(proto);
  ASSERT_TRUE(options.ok()) << options.status();
  const auto received = PolicyFromProto(PolicyToProto(*options));
  ASSERT_TRUE(received.ok()) << received.status();
  const RecallOptions want = {.enabled = true,
                              .all = true,
                              .recall_tokens = 7,
                              .min_share = 0,
                              .sketch_channels = 24,
                              .promote_candidates = 0,
                              .wait = true};
  EXPECT_TRUE(received->recall == want);
  EXPECT_EQ(received->device_ratio, 0);
  EXPECT_FALSE(received->pooled_seeds);
  EXPECT_EQ(received->recent_tokens, 32);
}

TEST(PolicyProtoTest, PositionsSurviveTheWayAreReportedAndRefusedByName) {
  v1::PolicyOptions proto;
  proto.set_policy("streaming");
  EXPECT_EQ(PolicyFromProto(proto)->positions, Positions::kAbsolute);
  proto.set_positions("cache_relative");
  const PolicyOptions relative = *PolicyFromProto(PolicyToProto(*PolicyFromProto(proto)));
  EXPECT_EQ(relative.positions, Positions::kCacheRelative);
  EXPECT_EQ(BudgetToProto(relative, *ResolveBudget(relative, 1000)).positions(), "cache_relative");
  proto.set_positions("relative");
  EXPECT_EQ(PolicyFromProto(proto).status().message(),
            "policy.positions: positions is \"relative\", want one of: absolute, cache_relative");
}

TEST(PolicyProtoTest, BudgetsOfKvHeadsSurviveTheWayAndAreReported) {
  v1::PolicyOptions proto;
  proto.set_scope("kv_head");
  const PolicyOptions even = *PolicyFromProto(proto);
  EXPECT_EQ(BudgetToProto(even, *ResolveBudget(even, 1000)).head_budgets(), "even");
  EXPECT_EQ(BudgetToProto(even, *ResolveBudget(even, 1000)).head_budget_floor(), 0);
  proto.set_head_budgets("adaptive");
  EXPECT_EQ(PolicyFromProto(proto)->head_budget_floor, 0.2);
  proto.set_head_budget_floor(0);
  const PolicyOptions divided = *PolicyFromProto(PolicyToProto(*PolicyFromProto(proto)));
  EXPECT_EQ(divided.head_budgets, HeadBudgets::kAdaptive);
  EXPECT_EQ(divided.head_budget_floor, 0);
  proto.set_head_budget_floor(0.5);
  const PolicyOptions half = *PolicyFromProto(proto);
  const v1::ResolvedBudget budget = BudgetToProto(half, *ResolveBudget(half, 1000));
  EXPECT_EQ(budget.head_budgets(), "adaptive");
  EXPECT_EQ(budget.head_budget_floor(), 0.5);
  proto.set_head_budgets("ada");
  EXPECT_EQ(PolicyFromProto(proto).status().message(),
            "policy.head_budgets: head_budgets is \"ada\", want one of: even, adaptive");
}

TEST(PolicyProtoTest, TheOracleChoosesByHeadAndReportsWhatAQueryAttendsTo) {
  v1::PolicyOptions proto;
  proto.set_policy("oracle");
  proto.set_heavy_tokens(30);
  proto.set_recent_tokens(20);
  const PolicyOptions oracle = *PolicyFromProto(PolicyToProto(*PolicyFromProto(proto)));
  EXPECT_EQ(oracle.scope, Scope::kKvHead);
  const v1::ResolvedBudget budget = BudgetToProto(oracle, *ResolveBudget(oracle, 1000));
  EXPECT_EQ(budget.attended_tokens(), 50);
  EXPECT_FALSE(budget.bounded_decode());
}

TEST(PolicyProtoTest, WhatSomePoliciesAloneHaveSurvivesTheWayAndIsReported) {
  v1::PolicyOptions proto;
  proto.set_policy("pyramidkv");
  proto.set_exposure(0.5);
  proto.set_pyramid_beta(3);
  const PolicyOptions pyramid = *PolicyFromProto(PolicyToProto(*PolicyFromProto(proto)));
  EXPECT_EQ(pyramid.exposure, 0.5);
  EXPECT_EQ(pyramid.pyramid_beta, 3);
  const v1::ResolvedBudget budget =
      BudgetToProto(pyramid, *ResolveBudget(pyramid, 4000, /*num_layers=*/4));
  EXPECT_EQ(budget.exposure(), 0.5);
  EXPECT_EQ(budget.pyramid_beta(), 3);
  EXPECT_EQ(budget.history_window(), 0);
  ASSERT_EQ(budget.layer_budget_tokens_size(), 4);
  EXPECT_GT(budget.layer_budget_tokens(0), budget.layer_budget_tokens(3));
  EXPECT_EQ(budget.layer_recent_tokens_size(), 4);

  proto.Clear();
  proto.set_policy("scissorhands");
  proto.set_history_window(123);
  const PolicyOptions counts = *PolicyFromProto(PolicyToProto(*PolicyFromProto(proto)));
  EXPECT_EQ(counts.history_window, 123);
  EXPECT_EQ(counts.recent_tokens, 10);
  EXPECT_EQ(BudgetToProto(counts, *ResolveBudget(counts, 1000)).history_window(), 123);
}

TEST(PolicyProtoTest, ThePresetsTravelUnchanged) {
  for (const char* name : {"recall", "snapkv_h2o", "scissorhands", "pyramidkv"}) {
    v1::PolicyOptions proto;
    proto.set_policy(name);
    const v1::PolicyOptions sent = PolicyToProto(*PolicyFromProto(proto));
    EXPECT_EQ(sent.policy(), std::string(name) == "recall" ? "snapkv_h2o" : name);
    EXPECT_EQ(sent.recall(), std::string(name) == "recall");
    EXPECT_EQ(sent.device_ratio(), sent.recall() ? 0.2 : 0);
    EXPECT_EQ(sent.pooled_seeds(), sent.recall());
    EXPECT_EQ(sent.sink_tokens(), sent.recall() ? 4 : 0);
    EXPECT_EQ(PolicyToProto(*PolicyFromProto(sent)).SerializeAsString(), sent.SerializeAsString());
  }
}

TEST(PolicyProtoTest, ABudgetThatWasAskedForReplacesThePresetsBytes) {
  v1::PolicyOptions proto;
  proto.set_policy("recall");
  proto.set_heavy_tokens(100);
  EXPECT_EQ(PolicyFromProto(proto)->device_ratio, 0);
  proto.clear_heavy_tokens();
  proto.set_heavy_ratio(0.3);
  EXPECT_EQ(PolicyFromProto(proto)->device_ratio, 0);
  proto.set_device_ratio(0.1);
  EXPECT_EQ(PolicyFromProto(proto)->device_ratio, 0.1);
}

TEST(PolicyProtoTest, TheResolvedBudgetSaysWhatRecallMayPick) {
  const PolicyOptions tuned = *Preset("recall");
  const v1::ResolvedBudget budget = BudgetToProto(tuned, *ResolveBudget(tuned, 1000));
  EXPECT_EQ(budget.policy(), "snapkv_h2o");
  EXPECT_TRUE(budget.recall());
  EXPECT_FALSE(budget.recall_all());
  EXPECT_EQ(budget.recall_tokens(), 64);
  EXPECT_EQ(budget.recall_min_share(), 1e-4);
  EXPECT_EQ(budget.promote_candidates(), 32);
  EXPECT_EQ(budget.device_ratio(), 0.2);
  EXPECT_TRUE(budget.pooled_seeds());
  const PolicyOptions plain = *Preset("snapkv_h2o");
  const v1::ResolvedBudget without = BudgetToProto(plain, *ResolveBudget(plain, 1000));
  EXPECT_FALSE(without.recall());
  EXPECT_EQ(without.recall_tokens(), 0);
}

}  // namespace
}  // namespace heavywater
