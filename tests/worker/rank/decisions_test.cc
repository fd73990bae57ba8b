// What a policy decides depends on what was seen until then, and on nothing else: not on
// chunks, ranks, or what comes later. Every policy, both scopes.
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/rank/test_group.h"

namespace heavywater {
namespace {

constexpr int kPrompt = 50;
constexpr int kSteps = 20;

struct Method {
  Policy policy;
  Scope scope;
  HeadBudgets head_budgets = HeadBudgets::kEven;
};

std::vector<Method> AllMethods() {
  std::vector<Method> methods;
  for (Policy policy : {Policy::kFull, Policy::kStreaming, Policy::kH2o, Policy::kSnapKv,
                        Policy::kSnapKvH2o, Policy::kScissorhands, Policy::kPyramidKv}) {
    for (Scope scope : {Scope::kLayer, Scope::kKvHead}) methods.push_back({policy, scope});
  }
  for (Policy policy : {Policy::kH2o, Policy::kSnapKv, Policy::kSnapKvH2o, Policy::kScissorhands,
                        Policy::kPyramidKv}) {
    methods.push_back({policy, Scope::kKvHead, HeadBudgets::kAdaptive});
  }
  return methods;
}

std::string NameOf(const Method& method) {
  return std::string(PolicyName(method.policy)) + " " + std::string(ScopeName(method.scope)) + " " +
         std::string(HeadBudgetsName(method.head_budgets));
}

SequenceOptions OptionsOf(const Method& method) {
  SequenceOptions options = TestSequence(method.policy, method.scope, 12, 4, kPrompt);
  options.policy.head_budgets = method.head_budgets;
  options.policy.sink_tokens = method.policy == Policy::kStreaming ? 2 : 0;
  options.policy.window = 8;
  options.policy.history_window = 9;
  options.policy.pyramid_beta = 4;
  options.policy.plan_interval_steps = method.policy == Policy::kScissorhands ? 3 : 1;
  return options;
}

TestGroupOptions Group(int world_size, int max_step_tokens = 64) {
  TestGroupOptions options;
  options.world_size = world_size;
  options.num_layers = 3;
  options.kv_heads = 3;
  options.query_heads = 6;
  options.max_step_tokens = max_step_tokens;
  return options;
}

using Sets = std::vector<std::vector<Ledger>>;  // [layer][set]

// The sets after the prompt and after each step. From step `other_from` on, other tokens.
std::vector<Sets> RunMethod(const Method& method, const TestGroupOptions& group_options,
                            int other_from = kSteps) {
  TestGroup group(group_options);
  EXPECT_TRUE(group.OpenAndRunPrompt(1, OptionsOf(method), TestTokens(0, kPrompt)).ok());
  std::vector<Sets> result;
  for (int step = 0; step <= kSteps; ++step) {
    Sets& sets = result.emplace_back();
    for (int layer = 0; layer < 3; ++layer) sets.push_back(group.Sets(1, layer));
    if (step == kSteps) break;
    const int tag = step < other_from ? 0 : 5;
    EXPECT_TRUE(group.Append({{1, TestTokens(tag, 1, kPrompt + step)}}).ok());
  }
  return result;
}

TEST(DecisionsTest, AChunkedPromptDecidesAsTheWholeOne) {
  for (const Method& method : AllMethods()) {
    EXPECT_EQ(RunMethod(method, Group(1, 7)), RunMethod(method, Group(1, 64))) << NameOf(method);
  }
}

TEST(DecisionsTest, ThreeRanksDecideAsOne) {
  for (const Method& method : AllMethods()) {
    EXPECT_EQ(RunMethod(method, Group(3)), RunMethod(method, Group(1))) << NameOf(method);
  }
}

TEST(DecisionsTest, LaterTokensNeverChangeAnEarlierDecision) {
  constexpr int kOtherFrom = 8;
  for (const Method& method : AllMethods()) {
    const std::vector<Sets> one = RunMethod(method, Group(1));
    const std::vector<Sets> other = RunMethod(method, Group(1), kOtherFrom);
    for (int step = 0; step <= kOtherFrom; ++step) {
      EXPECT_EQ(one[step], other[step]) << NameOf(method) << " after step " << step;
    }
    EXPECT_TRUE(method.policy == Policy::kFull || method.policy == Policy::kStreaming ||
                method.policy == Policy::kSnapKv || one.back() != other.back())
        << NameOf(method) << ": other tokens lead nowhere else";
  }
}

TEST(DecisionsTest, LayersOfAPyramidHoldTheirOwnBudgetsAndNoMoreThanAllTogether) {
  TestGroup group(Group(1));
  const Method method = {Policy::kPyramidKv, Scope::kKvHead};
  ASSERT_TRUE(group.OpenAndRunPrompt(1, OptionsOf(method), TestTokens(0, kPrompt)).ok());
  for (int step = 0; step < 3; ++step) {
    const std::vector<LayerBudget> budgets = group.cache().Stats(1)->budget.layers;
    ASSERT_EQ(budgets.size(), 3u);
    size_t total = 0;
    for (int layer = 0; layer < 3; ++layer) {
      for (const Ledger& set : group.Sets(1, layer)) {
        EXPECT_EQ(static_cast<int64_t>(set.size()), budgets[layer].budget_tokens);
      }
      total += group.Sets(1, layer)[0].size();
    }
    EXPECT_GT(budgets[0].budget_tokens, budgets[2].budget_tokens);
    EXPECT_EQ(total, 3u * 16);
    EXPECT_EQ(group.cache().Stats(1)->tokens_resident, 16);
    ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, kPrompt + step)}}).ok());
  }
}

TEST(DecisionsTest, KvHeadsDivideTheSlotsOfALayerAndNeverHoldMoreThanItHas) {
  for (const int ranks : {1, 3}) {
    TestGroup group(Group(ranks));
    SequenceOptions options =
        OptionsOf({Policy::kSnapKvH2o, Scope::kKvHead, HeadBudgets::kAdaptive});
    options.policy.head_budget_floor = 0;
    ASSERT_TRUE(group.OpenAndRunPrompt(1, options, TestTokens(0, kPrompt)).ok());
    bool uneven = false;
    for (int step = 0; step < 3; ++step) {
      for (int layer = 0; layer < 3; ++layer) {
        size_t total = 0;
        for (const Ledger& set : group.Sets(1, layer)) {
          total += set.size();
          uneven = uneven || set.size() != 16;
        }
        EXPECT_EQ(total, 3u * 16) << "layer " << layer;
      }
      for (int rank = 0; rank < ranks; ++rank) {
        EXPECT_EQ(group.cache(rank).Stats(1)->tokens_resident, 16);
      }
      ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, kPrompt + step)}}).ok());
    }
    EXPECT_TRUE(uneven);
  }
}

TEST(DecisionsTest, KvHeadsOfTheirOwnBudgetsGrowForALongAppendAndComeBack) {
  TestGroup group(Group(1));
  const Method method = {Policy::kH2o, Scope::kKvHead, HeadBudgets::kAdaptive};
  ASSERT_TRUE(group.OpenAndRunPrompt(1, OptionsOf(method), TestTokens(0, kPrompt)).ok());
  std::vector<size_t> sizes;
  for (const Ledger& set : group.Sets(1, 0)) sizes.push_back(set.size());
  const int64_t before = group.cache().Stats(1)->device_bytes;
  ASSERT_TRUE(group.Append({{1, TestTokens(0, 30, kPrompt)}}).ok());
  EXPECT_EQ(group.cache().Stats(1)->device_bytes, before);
  EXPECT_EQ(group.cache().Stats(1)->tokens_resident, 16);
  for (size_t head = 0; head < sizes.size(); ++head) {
    EXPECT_EQ(group.Sets(1, 0)[head].size(), sizes[head]);
  }
}

// One rank holds all heads: dividing its slots costs none.
TEST(DecisionsTest, OneRankTakesTheSameBytesForDividedSlotsAsForEvenOnes) {
  int64_t bytes[2] = {};
  for (const HeadBudgets budgets : {HeadBudgets::kEven, HeadBudgets::kAdaptive}) {
    TestGroup group(Group(1));
    const Method method = {Policy::kSnapKvH2o, Scope::kKvHead, budgets};
    ASSERT_TRUE(group.OpenAndRunPrompt(1, OptionsOf(method), TestTokens(0, kPrompt)).ok());
    bytes[budgets == HeadBudgets::kEven ? 0 : 1] = group.cache().Stats(1)->device_bytes;
  }
  EXPECT_EQ(bytes[1], bytes[0]);
}

TEST(DecisionsTest, LayersOfAPyramidGrowForALongAppendAndComeBack) {
  TestGroup group(Group(1));
  const Method method = {Policy::kPyramidKv, Scope::kLayer};
  ASSERT_TRUE(group.OpenAndRunPrompt(1, OptionsOf(method), TestTokens(0, kPrompt)).ok());
  const int64_t before = group.cache().Stats(1)->device_bytes;
  ASSERT_TRUE(group.Append({{1, TestTokens(0, 30, kPrompt)}}).ok());
  EXPECT_EQ(group.cache().Stats(1)->device_bytes, before);
  EXPECT_EQ(group.cache().Stats(1)->tokens_resident, 16);
  EXPECT_EQ(group.cache().Stats(1)->tokens_seen, kPrompt + 30);
}

}  // namespace
}  // namespace heavywater
