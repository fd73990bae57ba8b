#include "worker/policy/policy.h"

#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr Policy kAllPolicies[] = {Policy::kFull,     Policy::kStreaming, Policy::kH2o,
                                   Policy::kSnapKv,   Policy::kSnapKvH2o, Policy::kScissorhands,
                                   Policy::kPyramidKv};

PolicyOptions Explicit(Policy policy, int64_t heavy, int64_t recent, int sinks = 0) {
  PolicyOptions options;
  options.policy = policy;
  options.heavy_tokens = heavy;
  options.recent_tokens = recent;
  options.sink_tokens = sinks;
  return options;
}

PolicyOptions Ratio(Policy policy, double heavy, double recent, int min_budget) {
  PolicyOptions options;
  options.policy = policy;
  options.heavy_ratio = heavy;
  options.recent_ratio = recent;
  options.min_budget_tokens = min_budget;
  return options;
}

std::string ErrorOf(const PolicyOptions& options, int64_t prompt_tokens = 100) {
  const absl::StatusOr<Budget> budget = ResolveBudget(options, prompt_tokens);
  if (budget.ok()) return "";
  EXPECT_EQ(budget.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(budget.status().message());
}

// What a policy decides for 1536 prompt tokens and a budget of 307, 153 recent.
struct Snapshot {
  Policy policy;
  int sinks;
  int64_t budget, recent, prompt_budget, prompt_recent;
  PromptScores scores;
  int64_t window;
  bool bounded, uses_scores;
};

TEST(PolicyTest, EachPolicyYieldsItsParameters) {
  const Snapshot snapshots[] = {
      {Policy::kFull, 0, 0, 0, 0, 0, PromptScores::kNone, 0, false, false},
      {Policy::kStreaming, 4, 307, 303, 307, 303, PromptScores::kNone, 0, true, false},
      {Policy::kH2o, 0, 307, 153, 307, 153, PromptScores::kAllQueries, 0, true, true},
      {Policy::kSnapKv, 0, 0, 0, 307, 32, PromptScores::kWindow, 32, false, false},
      {Policy::kSnapKvH2o, 0, 307, 153, 307, 32, PromptScores::kWindow, 32, true, true},
      {Policy::kScissorhands, 0, 307, 153, 307, 153, PromptScores::kWindow, 400, true, true},
      {Policy::kPyramidKv, 0, 307, 153, 307, 32, PromptScores::kWindow, 32, true, true},
  };
  for (const Snapshot& want : snapshots) {
    SCOPED_TRACE(std::string(PolicyName(want.policy)));
    PolicyOptions options = Ratio(want.policy, 0.1, 0.1, 1);
    options.sink_tokens = want.sinks;
    const Budget got = *ResolveBudget(options, 1536);
    EXPECT_EQ(got.budget_tokens, want.budget);
    EXPECT_EQ(got.sink_tokens, want.sinks);
    EXPECT_EQ(got.recent_tokens, want.recent);
    EXPECT_EQ(got.prompt_budget_tokens, want.prompt_budget);
    EXPECT_EQ(got.prompt_recent_tokens, want.prompt_recent);
    EXPECT_EQ(got.prompt_scores, want.scores);
    EXPECT_EQ(got.window, want.window);
    EXPECT_EQ(got.bounded_decode, want.bounded);
    EXPECT_EQ(got.uses_scores, want.uses_scores);
  }
}

TEST(PolicyTest, RatiosOfThePromptAreSplitAsTheEvaluationSplitsThem) {
  struct Row {
    double ratio;
    int64_t budget, recent;
  };
  for (const Row& row : {Row{0.1, 153, 76}, Row{0.2, 307, 153}, Row{0.4, 614, 307}}) {
    const Budget budget =
        *ResolveBudget(Ratio(Policy::kH2o, row.ratio / 2, row.ratio / 2, 1), 1536);
    EXPECT_EQ(budget.budget_tokens, row.budget) << row.ratio;
    EXPECT_EQ(budget.recent_tokens, row.recent) << row.ratio;
  }
}

TEST(PolicyTest, ARatioWithoutAnExactDoubleIsNotRoundedDown) {
  PolicyOptions options = Ratio(Policy::kH2o, 0.29, 0.29, 1);
  EXPECT_EQ(ResolveBudget(options, 100)->budget_tokens, 58);
  EXPECT_EQ(ResolveBudget(options, 100)->recent_tokens, 29);
}

TEST(PolicyTest, TheFloorLiftsSmallBudgetsByRatioAndNotExplicitOnes) {
  EXPECT_EQ(ResolveBudget(Ratio(Policy::kH2o, 0.1, 0.1, 256), 100)->budget_tokens, 256);
  EXPECT_EQ(ResolveBudget(Explicit(Policy::kH2o, 8, 8), 100)->budget_tokens, 16);
  PolicyOptions recent_given = Ratio(Policy::kH2o, 0.1, 0.1, 256);
  recent_given.recent_tokens = 32;
  EXPECT_EQ(ResolveBudget(recent_given, 100)->budget_tokens, 256);
  EXPECT_EQ(ResolveBudget(recent_given, 100)->recent_tokens, 32);
}

TEST(PolicyTest, ABudgetLargerThanThePromptIsFine) {
  const Budget budget = *ResolveBudget(Explicit(Policy::kH2o, 1000, 1000), 10);
  EXPECT_EQ(budget.budget_tokens, 2000);
}

// CASES A3: short inputs, extreme ratios, length 1.
TEST(PolicyTest, CaseA3BudgetsOfShortPromptsAreNeverZero) {
  for (Policy policy : kAllPolicies) {
    for (int sinks : {0, 1, 4}) {
      for (double ratio : {0.0001, 0.02, 0.2, 0.3, 0.48, 0.5, 1.0}) {
        for (int64_t length : {1, 2, 3, 5, 10, 33}) {
          PolicyOptions options = Ratio(policy, ratio, ratio, 1);
          options.sink_tokens = sinks;
          const absl::StatusOr<Budget> budget = ResolveBudget(options, length);
          ASSERT_TRUE(budget.ok()) << budget.status();
          if (policy == Policy::kFull) continue;
          EXPECT_GE(budget->prompt_budget_tokens, sinks + 1);
          EXPECT_GE(budget->prompt_recent_tokens, 1);
          EXPECT_LE(sinks + budget->prompt_recent_tokens, budget->prompt_budget_tokens);
          if (!budget->bounded_decode) continue;
          EXPECT_GE(budget->recent_tokens, 1);
          EXPECT_LE(sinks + budget->recent_tokens, budget->budget_tokens);
        }
      }
    }
  }
}

TEST(PolicyTest, CaseA3ARatioOfOneKeepsTheWholePrompt) {
  EXPECT_EQ(ResolveBudget(Ratio(Policy::kH2o, 0.5, 0.5, 1), 10)->budget_tokens, 10);
  EXPECT_EQ(ResolveBudget(Ratio(Policy::kH2o, 1.0, 1.0, 1), 10)->budget_tokens, 20);
}

// CASES A4: recent 0 is rejected, since a newcomer would always be the minimum.
TEST(PolicyTest, CaseA4ARecentPartOfZeroIsRefused) {
  PolicyOptions options = Explicit(Policy::kH2o, 14, 0);
  options.recent_ratio = 0;
  EXPECT_THAT(ErrorOf(options), HasSubstr("recent_ratio is 0"));
  options.recent_tokens = -1;
  EXPECT_THAT(ErrorOf(options), HasSubstr("recent_tokens is -1"));
}

TEST(PolicyTest, AWindowLargerThanTheBudgetKeepsItsNewestPart) {
  const Budget budget = *ResolveBudget(Explicit(Policy::kSnapKvH2o, 8, 8, 2), 100);
  EXPECT_EQ(budget.window, 32);
  EXPECT_EQ(budget.prompt_recent_tokens, 14);
}

TEST(PolicyTest, AWindowIsAtMostThePrompt) {
  EXPECT_EQ(ResolveBudget(Explicit(Policy::kSnapKv, 50, 50), 5)->window, 5);
}

TEST(PolicyTest, ErrorsNameTheFieldWhatCameAndWhatWasWanted) {
  struct Row {
    void (*change)(PolicyOptions&);
    const char* error;
  };
  const Row rows[] = {
      {[](PolicyOptions& o) { o.heavy_tokens = -3; }, "heavy_tokens is -3, want 0 to"},
      {[](PolicyOptions& o) { o.heavy_ratio = 0; }, "heavy_ratio is 0, want above 0 and up to 1"},
      {[](PolicyOptions& o) { o.recent_ratio = 1.5; }, "recent_ratio is 1.5"},
      {[](PolicyOptions& o) { o.heavy_ratio = std::nan(""); }, "heavy_ratio is nan"},
      {[](PolicyOptions& o) { o.sink_tokens = -1; }, "sink_tokens is -1"},
      {[](PolicyOptions& o) { o.min_budget_tokens = 0; }, "min_budget_tokens is 0, want 1"},
      {[](PolicyOptions& o) { o.window = 0; }, "window is 0, want 1"},
      {[](PolicyOptions& o) { o.pool_kernel = 4; }, "pool_kernel is 4, want an odd number"},
      {[](PolicyOptions& o) { o.pool_kernel = -1; }, "pool_kernel is -1"},
      {[](PolicyOptions& o) { o.plan_interval_steps = 0; }, "plan_interval_steps is 0, want 1"},
      {[](PolicyOptions& o) { o.decay = 0; }, "decay is 0"},
      {[](PolicyOptions& o) { o.decay = 1.01; }, "decay is 1.01"},
      {[](PolicyOptions& o) { o.heavy_tokens = 3, o.sink_tokens = 4; },
       "heavy_tokens is 3, want at least sink_tokens, 4"},
      {[](PolicyOptions& o) { o.recall.recall_tokens = 0; }, "recall_tokens is 0, want 1 to 4096"},
      {[](PolicyOptions& o) { o.recall.recall_tokens = 4097; }, "recall_tokens is 4097"},
      {[](PolicyOptions& o) { o.recall.min_share = -0.1; }, "recall_min_share is -0.1, want 0"},
      {[](PolicyOptions& o) { o.recall.min_share = 1; }, "recall_min_share is 1"},
      {[](PolicyOptions& o) { o.recall.min_share = std::nan(""); }, "recall_min_share is nan"},
      {[](PolicyOptions& o) { o.recall.sketch_channels = 12; },
       "sketch_channels is 12, want a multiple of 8"},
      {[](PolicyOptions& o) { o.recall.sketch_channels = -8; }, "sketch_channels is -8, want 0 to"},
      {[](PolicyOptions& o) { o.recall.sketch_channels = 264; }, "sketch_channels is 264"},
      {[](PolicyOptions& o) { o.recall.promote_candidates = -1; },
       "promote_candidates is -1, want 0 to 1024"},
      {[](PolicyOptions& o) { o.recall.promote_candidates = 1025; }, "promote_candidates is 1025"},
      {[](PolicyOptions& o) { o.recall.all = true; }, "recall_all is true, want recall true"},
      {[](PolicyOptions& o) { o.recall.enabled = true, o.policy = Policy::kFull; },
       "recall is true, want false with policy full"},
      {[](PolicyOptions& o) { o.device_ratio = -0.1, o.recent_tokens = 8; },
       "device_ratio is -0.1, want above 0 and up to 1"},
      {[](PolicyOptions& o) { o.device_ratio = 1.1, o.recent_tokens = 8; }, "device_ratio is 1.1"},
      {[](PolicyOptions& o) { o.device_ratio = std::nan(""), o.recent_tokens = 8; },
       "device_ratio is nan"},
      {[](PolicyOptions& o) { o.device_ratio = 0.2; }, "recent_tokens is 0, want 1 or more"},
      {[](PolicyOptions& o) { o.device_ratio = 0.2, o.recent_tokens = 8, o.heavy_tokens = 8; },
       "heavy_tokens is 8, want 0 with device_ratio"},
      {[](PolicyOptions& o) {
         o.device_ratio = 0.2, o.recent_tokens = 8, o.policy = Policy::kSnapKv;
       },
       "device_ratio is 0.2, want 0 (none) with policy snapkv"},
  };
  for (const Row& row : rows) {
    PolicyOptions options;
    row.change(options);
    EXPECT_THAT(ErrorOf(options), HasSubstr(row.error));
  }
  EXPECT_THAT(ErrorOf(PolicyOptions(), 0), HasSubstr("prompt_tokens is 0"));
}

TEST(PolicyTest, HugeNumbersAreRefusedAndDoNotOverflow) {
  PolicyOptions options = Explicit(Policy::kH2o, std::numeric_limits<int64_t>::max(), 1);
  EXPECT_THAT(ErrorOf(options), HasSubstr("heavy_tokens is"));
}

TEST(PolicyTest, NamesAndPoliciesCorrespond) {
  for (Policy policy : kAllPolicies) EXPECT_EQ(*ParsePolicy(PolicyName(policy)), policy);
  for (Scope scope : {Scope::kLayer, Scope::kKvHead})
    EXPECT_EQ(*ParseScope(ScopeName(scope)), scope);
  const absl::Status status = ParsePolicy("h20").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("full, streaming, h2o, snapkv, snapkv_h2o"));
  EXPECT_THAT(std::string(ParseScope("head").status().message()), HasSubstr("layer, kv_head"));
}

TEST(PolicyTest, PresetsAreTheSystemAsOrdered) {
  const PolicyOptions ordered = *Preset("snapkv_h2o");
  EXPECT_EQ(ordered.policy, Policy::kSnapKvH2o);
  EXPECT_EQ(ordered.scope, Scope::kLayer);
  EXPECT_EQ(ordered.plan_interval_steps, 1);
  EXPECT_EQ(ordered.decay, 1.0);
  EXPECT_EQ(ordered.heavy_ratio, 0.1);
  EXPECT_EQ(ordered.recent_ratio, 0.1);
  EXPECT_EQ(ordered.min_budget_tokens, 256);
  EXPECT_EQ(Preset("h2o")->sink_tokens, 0);
  EXPECT_EQ(Preset("h2o")->min_budget_tokens, 1);
  EXPECT_EQ(Preset("streaming")->sink_tokens, 4);
  EXPECT_FALSE(ordered.recall.enabled);
  EXPECT_FALSE(ordered.pooled_seeds);
  EXPECT_EQ(ordered.device_ratio, 0);
  const absl::Status status = Preset("recal").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("scissorhands, pyramidkv, oracle, recall"));
}

TEST(PolicyTest, TheRecallPresetIsTheTunedSystem) {
  const PolicyOptions tuned = *Preset("recall");
  EXPECT_EQ(PolicyName(tuned.policy), "snapkv_h2o");
  EXPECT_EQ(tuned.scope, Scope::kLayer);
  EXPECT_TRUE(tuned.recall.enabled);
  EXPECT_FALSE(tuned.recall.all);
  EXPECT_EQ(tuned.recall.recall_tokens, 64);
  EXPECT_EQ(tuned.recall.min_share, 1e-4);
  EXPECT_EQ(tuned.recall.promote_candidates, 32);
  EXPECT_EQ(tuned.plan_interval_steps, 16);
  EXPECT_EQ(tuned.decay, 0.9);
  EXPECT_EQ(tuned.sink_tokens, 4);
  EXPECT_EQ(tuned.recent_tokens, 32);
  EXPECT_EQ(tuned.heavy_tokens, 0);
  EXPECT_TRUE(tuned.pooled_seeds);
  EXPECT_EQ(tuned.device_ratio, 0.2);
  EXPECT_TRUE(ResolveBudget(tuned, 1536).ok());
}

TEST(PolicyTest, RecallWorksWithEveryPolicyThatDemotes) {
  for (Policy policy : kAllPolicies) {
    PolicyOptions options;
    options.policy = policy;
    options.recall = {.enabled = true, .all = true, .recall_tokens = 1, .min_share = 0};
    const bool works = policy != Policy::kFull && policy != Policy::kScissorhands;
    EXPECT_EQ(ResolveBudget(options, 100).ok(), works) << PolicyName(policy);
  }
}

std::vector<int64_t> PyramidOf(int num_layers, int64_t budget, int64_t prompt_tokens,
                               double beta = 20) {
  PolicyOptions options = Explicit(Policy::kPyramidKv, budget - 40, 40);
  options.pyramid_beta = beta;
  const Budget resolved = ResolveBudget(options, prompt_tokens, num_layers).value();
  std::vector<int64_t> slots;
  for (int layer = 0; layer < num_layers; ++layer) {
    const LayerBudget of_layer = resolved.OfLayer(layer);
    EXPECT_EQ(of_layer.prompt_budget_tokens, of_layer.budget_tokens);
    EXPECT_GE(of_layer.recent_tokens, 1);
    EXPECT_LE(of_layer.recent_tokens, of_layer.budget_tokens);
    slots.push_back(of_layer.budget_tokens);
  }
  return slots;
}

TEST(PyramidKvTest, BudgetsFallLinearlyFromTwiceTheMeanToATwentieth) {
  // 200 beyond the window of 32: from 390 to 10 in five steps of 95.
  EXPECT_EQ(PyramidOf(5, 232, 4000), (std::vector<int64_t>{422, 327, 232, 137, 42}));
  EXPECT_EQ(PyramidOf(5, 232, 4000, /*beta=*/1), std::vector<int64_t>(5, 232));
}

TEST(PyramidKvTest, TheTotalIsThatOfEqualLayersToTheSlot) {
  for (int num_layers : {1, 2, 3, 30, 80}) {
    for (int64_t budget : {41, 50, 97, 307, 1000}) {
      for (int64_t prompt : {1, 60, 400, 1536}) {
        const std::vector<int64_t> slots = PyramidOf(num_layers, budget, prompt);
        EXPECT_EQ(std::accumulate(slots.begin(), slots.end(), int64_t{0}), budget * num_layers)
            << num_layers << " layers, budget " << budget << ", prompt " << prompt;
      }
    }
  }
}

TEST(PyramidKvTest, NoLayerGetsMoreThanThePromptHasWhileOthersCouldUseIt) {
  const std::vector<int64_t> slots = PyramidOf(5, 232, 300);
  EXPECT_EQ(slots.front(), 300);
  EXPECT_EQ(slots.back(), 164);
  EXPECT_EQ(PyramidOf(4, 232, 200), std::vector<int64_t>(4, 232));  // everything stays anyway
}

TEST(PolicyTest, BudgetsOfTheirOwnAreForKvHeadsOfPoliciesThatScoreThePrompt) {
  PolicyOptions good = Explicit(Policy::kSnapKvH2o, 8, 8);
  good.scope = Scope::kKvHead;
  good.head_budgets = HeadBudgets::kAdaptive;
  EXPECT_EQ(ErrorOf(good), "");
  PolicyOptions options = good;
  options.scope = Scope::kLayer;
  EXPECT_THAT(ErrorOf(options), HasSubstr("head_budgets is adaptive, want even with scope layer"));
  for (const double bad : {-0.1, 1.1, std::nan("")}) {
    options = good;
    options.head_budget_floor = bad;
    EXPECT_THAT(ErrorOf(options), HasSubstr("head_budget_floor is "));
  }
  for (Policy policy : {Policy::kFull, Policy::kStreaming, Policy::kOracle}) {
    options = good;
    options.policy = policy;
    EXPECT_THAT(ErrorOf(options), HasSubstr("head_budgets is adaptive, want even with policy " +
                                            std::string(PolicyName(policy))));
  }
  options = good;
  options.recall.enabled = true;
  EXPECT_THAT(ErrorOf(options), HasSubstr("head_budgets is adaptive, want even with recall"));
  options = good;
  options.positions = Positions::kCacheRelative;
  EXPECT_THAT(ErrorOf(options), HasSubstr("want even with positions cache_relative"));
  EXPECT_THAT(std::string(ParseHeadBudgets("ada").status().message()),
              HasSubstr("head_budgets is \"ada\", want one of: even, adaptive"));
  EXPECT_EQ(*ParseHeadBudgets(HeadBudgetsName(HeadBudgets::kAdaptive)), HeadBudgets::kAdaptive);
}

TEST(PolicyTest, WhatOnlySomePoliciesKnowIsRefusedByNameElsewhere) {
  PolicyOptions options = Explicit(Policy::kStreaming, 8, 8);
  options.exposure = 0.5;
  EXPECT_THAT(ErrorOf(options), HasSubstr("exposure is 0.5, want 0 with policy streaming"));
  options.policy = Policy::kH2o;
  EXPECT_EQ(ErrorOf(options), "");
  for (const double bad : {-0.1, 4.1, std::nan("")}) {
    options.exposure = bad;
    EXPECT_THAT(ErrorOf(options), HasSubstr("exposure is "));
  }
  options = Explicit(Policy::kScissorhands, 8, 8);
  options.decay = 0.9;
  EXPECT_THAT(ErrorOf(options), HasSubstr("decay is 0.9, want 1 with policy scissorhands"));
  options.decay = 1.0;
  options.recall.enabled = true;
  EXPECT_THAT(ErrorOf(options), HasSubstr("recall is true, want false with policy scissorhands"));
  options.recall.enabled = false;
  options.history_window = 600;  // counts of 600 plans for every resident
  EXPECT_THAT(ErrorOf(options), HasSubstr("history_window is 600, want 1 to 512"));
  options.plan_interval_steps = 2;
  EXPECT_EQ(ErrorOf(options), "");
  options = Explicit(Policy::kPyramidKv, 8, 8);
  options.pyramid_beta = 0.5;
  EXPECT_THAT(ErrorOf(options), HasSubstr("pyramid_beta is 0.5, want 1"));
}

TEST(PolicyTest, ScissorhandsIsAsPublishedAndDropsInBatches) {
  const PolicyOptions options = *Preset("scissorhands");
  EXPECT_EQ(options.history_window, 400);
  EXPECT_EQ(options.recent_tokens, 10);
  EXPECT_EQ(options.plan_interval_steps, 16);
  const Budget budget = *ResolveBudget(options, 1536);
  EXPECT_EQ(budget.gains, GainKind::kPivotal);
  EXPECT_FALSE(budget.window_votes);
}

TEST(ReplaceBudgetTest, WhatIsGivenEndsWhatThePresetHasInstead) {
  const auto replaced = [](const GivenBudget& given) {
    PolicyOptions options = Preset("recall").value();
    ReplaceBudget(given, options);
    return options;
  };
  const PolicyOptions unchanged = replaced({});
  EXPECT_EQ(unchanged.device_ratio, 0.2);
  EXPECT_EQ(unchanged.recent_tokens, 32);
  EXPECT_EQ(replaced({.device_ratio = 0.1}).device_ratio, 0.1);
  EXPECT_EQ(replaced({.heavy_tokens = 100}).device_ratio, 0);
  EXPECT_EQ(replaced({.heavy_tokens = 100}).recent_tokens, 32);
  EXPECT_EQ(replaced({.heavy_ratio = 0.3}).device_ratio, 0);
  EXPECT_EQ(replaced({.recent_tokens = 64}).device_ratio, 0.2);
  const PolicyOptions by_ratio = replaced({.recent_ratio = 0.3});
  EXPECT_EQ(by_ratio.recent_tokens, 0);
  EXPECT_EQ(by_ratio.recent_ratio, 0.3);
  EXPECT_EQ(replaced({.recent_tokens = 64, .recent_ratio = 0.3}).recent_tokens, 64);
}

}  // namespace
}  // namespace heavywater
