#include "worker/policy/policy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/policy/policies/policies.h"

namespace heavywater {
namespace {

constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();  // Position is 32-bit
constexpr int kMaxPlanIntervalSteps = 4096;  // slots for an interval are allocated up front
constexpr int kMaxPoolKernel = 255;
constexpr int kMaxWindow = 4096;
constexpr int kMaxHistoryIntervals = 512;  // a count of each is kept for every resident
constexpr double kMaxExposure = 4;
constexpr double kMaxPyramidBeta = 1e6;
constexpr int kMaxRecallTokens = 4096;
constexpr int kMaxSketchChannels = 256;  // the largest head size with recall
constexpr int kMaxPromoteCandidates = 1024;

absl::Status CheckRange(const char* field, int64_t got, int64_t low, int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", got, ", want ", low, " to ", high));
}

// Written so that NaN is outside.
absl::Status CheckRatio(const char* field, double got) {
  if (got > 0 && got <= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", got, ", want above 0 and up to 1"));
}

absl::Status CheckPool(const PolicyOptions& options) {
  if (options.pooling == Pooling::kNone) return absl::OkStatus();
  HW_RETURN_IF_ERROR(CheckRange("pool_kernel", options.pool_kernel, 1, kMaxPoolKernel));
  if (options.pool_kernel % 2 == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("pool_kernel is ", options.pool_kernel, ", want an odd number"));
}

absl::Status CheckBudgetFields(const PolicyOptions& options) {
  HW_RETURN_IF_ERROR(CheckRange("heavy_tokens", options.heavy_tokens, 0, kMaxTokens / 4));
  HW_RETURN_IF_ERROR(CheckRange("recent_tokens", options.recent_tokens, 0, kMaxTokens / 4));
  HW_RETURN_IF_ERROR(CheckRange("sink_tokens", options.sink_tokens, 0, kMaxTokens / 4));
  HW_RETURN_IF_ERROR(CheckRange("min_budget_tokens", options.min_budget_tokens, 1, kMaxTokens / 4));
  if (options.heavy_tokens == 0) HW_RETURN_IF_ERROR(CheckRatio("heavy_ratio", options.heavy_ratio));
  if (options.recent_tokens == 0) {
    HW_RETURN_IF_ERROR(CheckRatio("recent_ratio", options.recent_ratio));
  }
  if (options.heavy_tokens > 0 && options.heavy_tokens < options.sink_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("heavy_tokens is ", options.heavy_tokens,
                                                   ", want at least sink_tokens, ",
                                                   options.sink_tokens, ", which count inside"));
  }
  return absl::OkStatus();
}

bool BoundsDecode(Policy policy) {
  return policy != Policy::kFull && policy != Policy::kSnapKv && policy != Policy::kOracle;
}

// What goes into slots is solved from the bytes: only `heavy` is left to solve.
absl::Status CheckDeviceRatio(const PolicyOptions& options) {
  if (options.device_ratio == 0) return absl::OkStatus();
  HW_RETURN_IF_ERROR(CheckRatio("device_ratio", options.device_ratio));
  if (!BoundsDecode(options.policy)) {
    return absl::InvalidArgumentError(
        absl::StrCat("device_ratio is ", options.device_ratio, ", want 0 (none) with policy ",
                     std::string(PolicyName(options.policy)), ", which is unbounded in decode"));
  }
  if (options.heavy_tokens > 0) {
    return absl::InvalidArgumentError(absl::StrCat("heavy_tokens is ", options.heavy_tokens,
                                                   ", want 0 with device_ratio, which solves it"));
  }
  if (options.recent_tokens > 0) return absl::OkStatus();
  return absl::InvalidArgumentError("recent_tokens is 0, want 1 or more with device_ratio");
}

bool AccumulatesProbabilities(Policy policy) {
  return policy == Policy::kH2o || policy == Policy::kSnapKvH2o || policy == Policy::kPyramidKv;
}

absl::Status CheckExposure(const PolicyOptions& options) {
  if (!(options.exposure >= 0 && options.exposure <= kMaxExposure)) {  // NaN is outside
    return absl::InvalidArgumentError(
        absl::StrCat("exposure is ", options.exposure, ", want 0 to ", kMaxExposure));
  }
  if (options.exposure == 0 || AccumulatesProbabilities(options.policy)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "exposure is ", options.exposure, ", want 0 with policy ",
      std::string(PolicyName(options.policy)), ", which accumulates no probabilities"));
}

absl::Status CheckScissorhands(const PolicyOptions& options) {
  if (options.policy != Policy::kScissorhands) return absl::OkStatus();
  HW_RETURN_IF_ERROR(CheckRange(
      "history_window", options.history_window, 1,
      std::min<int64_t>(kMaxWindow, int64_t{kMaxHistoryIntervals} * options.plan_interval_steps)));
  if (options.decay != 1.0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "decay is ", options.decay, ", want 1 with policy scissorhands: its window forgets"));
  }
  if (!options.recall.enabled) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "recall is true, want false with policy scissorhands: a count of pivotal queries cannot be "
      "compared with what demoted positions receive");
}

absl::Status CheckPyramid(const PolicyOptions& options) {
  if (options.policy != Policy::kPyramidKv) return absl::OkStatus();
  if (options.pyramid_beta >= 1 && options.pyramid_beta <= kMaxPyramidBeta) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("pyramid_beta is ", options.pyramid_beta,
                                                 ", want 1 (all layers alike) to ",
                                                 kMaxPyramidBeta));
}

absl::Status CheckRecall(const PolicyOptions& options) {
  const RecallOptions& recall = options.recall;
  HW_RETURN_IF_ERROR(CheckRange("recall_tokens", recall.recall_tokens, 1, kMaxRecallTokens));
  if (!(recall.min_share >= 0 && recall.min_share < 1)) {  // written so that NaN is outside
    return absl::InvalidArgumentError(
        absl::StrCat("recall_min_share is ", recall.min_share, ", want 0 or more and below 1"));
  }
  HW_RETURN_IF_ERROR(CheckRange("sketch_channels", recall.sketch_channels, 0, kMaxSketchChannels));
  if (recall.sketch_channels % 8 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("sketch_channels is ", recall.sketch_channels,
                                                   ", want a multiple of 8, or 0 for the default"));
  }
  HW_RETURN_IF_ERROR(
      CheckRange("promote_candidates", recall.promote_candidates, 0, kMaxPromoteCandidates));
  if (recall.all && !recall.enabled) {
    return absl::InvalidArgumentError("recall_all is true, want recall true with it");
  }
  const bool keeps_all = options.policy == Policy::kFull || options.policy == Policy::kOracle;
  if (recall.enabled && keeps_all) {
    return absl::InvalidArgumentError(absl::StrCat("recall is true, want false with policy ",
                                                   std::string(PolicyName(options.policy)),
                                                   ": nothing is ever demoted there"));
  }
  return absl::OkStatus();
}

absl::Status CheckOracle(const PolicyOptions& options) {
  if (options.policy != Policy::kOracle || options.scope == Scope::kKvHead) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "scope is layer, want kv_head with policy oracle: each head chooses within its own step");
}

bool HasPromptScores(Policy policy) {
  return policy != Policy::kFull && policy != Policy::kStreaming && policy != Policy::kOracle;
}

absl::Status CheckHeadBudgets(const PolicyOptions& options) {
  if (options.head_budgets == HeadBudgets::kEven) return absl::OkStatus();
  const auto want_even = [](const std::string& why) {
    return absl::InvalidArgumentError(absl::StrCat("head_budgets is adaptive, want even ", why));
  };
  if (!(options.head_budget_floor >= 0 && options.head_budget_floor <= 1)) {  // NaN is outside
    return absl::InvalidArgumentError(
        absl::StrCat("head_budget_floor is ", options.head_budget_floor, ", want 0 to 1"));
  }
  if (options.scope == Scope::kLayer) {
    return want_even("with scope layer, where all heads share one set");
  }
  if (!HasPromptScores(options.policy)) {
    return want_even(absl::StrCat("with policy ", std::string(PolicyName(options.policy)),
                                  ", which has no scores of the prompt to divide slots by"));
  }
  if (options.recall.enabled) {
    return want_even("with recall: promotion counts on sets of equal size");
  }
  if (options.positions == Positions::kAbsolute) return absl::OkStatus();
  return want_even("with positions cache_relative: a query has one place in a layer's sets");
}

// Sketches estimate logits of keys where they are; there a key turns with every plan.
absl::Status CheckPositions(const PolicyOptions& options) {
  if (options.positions == Positions::kAbsolute) return absl::OkStatus();
  if (options.policy == Policy::kOracle) {
    return absl::InvalidArgumentError(
        "positions is cache_relative, want absolute with policy oracle: its cache is the text");
  }
  if (!options.recall.enabled) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "positions is cache_relative, want absolute with recall: a demoted position has no place in "
      "the cache");
}

absl::Status Check(const PolicyOptions& options, int64_t prompt_tokens) {
  HW_RETURN_IF_ERROR(CheckRange("prompt_tokens", prompt_tokens, 1, kMaxTokens));
  HW_RETURN_IF_ERROR(CheckBudgetFields(options));
  HW_RETURN_IF_ERROR(CheckRange("window", options.window, 1, kMaxWindow));
  HW_RETURN_IF_ERROR(CheckPool(options));
  HW_RETURN_IF_ERROR(
      CheckRange("plan_interval_steps", options.plan_interval_steps, 1, kMaxPlanIntervalSteps));
  HW_RETURN_IF_ERROR(CheckRatio("decay", options.decay));
  HW_RETURN_IF_ERROR(CheckDeviceRatio(options));
  HW_RETURN_IF_ERROR(CheckExposure(options));
  HW_RETURN_IF_ERROR(CheckScissorhands(options));
  HW_RETURN_IF_ERROR(CheckPyramid(options));
  HW_RETURN_IF_ERROR(CheckOracle(options));
  HW_RETURN_IF_ERROR(CheckHeadBudgets(options));
  HW_RETURN_IF_ERROR(CheckPositions(options));
  return CheckRecall(options);
}

// `ratio` of `tokens`, whole. A ratio such as 0.29 has no exact double: 0.29 * 100
// must still be 29.
int64_t Share(double ratio, int64_t tokens) {
  return static_cast<int64_t>(std::floor(ratio * static_cast<double>(tokens) + 1e-6));
}

// Both by ratio: the sum is rounded once, so that a budget of 20 % is that, and
// is then split.
TokenBudget SplitByRatio(const PolicyOptions& options, int64_t prompt_tokens) {
  const double ratio = options.heavy_ratio + options.recent_ratio;
  TokenBudget tokens;
  tokens.budget_tokens = std::max<int64_t>(
      {Share(ratio, prompt_tokens), options.min_budget_tokens, int64_t{options.sink_tokens} + 1});
  tokens.recent_tokens =
      std::clamp<int64_t>(Share(options.recent_ratio / ratio, tokens.budget_tokens), 1,
                          tokens.budget_tokens - options.sink_tokens);
  return tokens;
}

// The floor lifts what is given by ratio; what is given in tokens stays so.
TokenBudget ResolveTokens(const PolicyOptions& options, int64_t prompt_tokens) {
  const bool heavy_given = options.heavy_tokens > 0;
  const bool recent_given = options.recent_tokens > 0;
  if (!heavy_given && !recent_given) return SplitByRatio(options, prompt_tokens);

  int64_t heavy = options.heavy_tokens;
  int64_t recent = options.recent_tokens;
  if (!heavy_given) {
    heavy = std::max<int64_t>({Share(options.heavy_ratio, prompt_tokens),
                               options.min_budget_tokens - recent, options.sink_tokens});
  }
  if (!recent_given) {
    recent = std::max<int64_t>(
        {Share(options.recent_ratio, prompt_tokens), options.min_budget_tokens - heavy, 1});
  }
  return {.budget_tokens = heavy + recent, .recent_tokens = recent};
}

}  // namespace

void ReplaceBudget(const GivenBudget& given, PolicyOptions& options) {
  const bool replaced =
      given.heavy_tokens != 0 || given.heavy_ratio != 0 || given.recent_ratio != 0;
  if (given.device_ratio.has_value() || replaced) {
    options.device_ratio = given.device_ratio.value_or(0);
  }
  if (given.recent_ratio != 0 && given.recent_tokens == 0) options.recent_tokens = 0;
  const auto take = [](auto from, auto& to) {
    if (from != 0) to = from;
  };
  take(given.heavy_tokens, options.heavy_tokens);
  take(given.recent_tokens, options.recent_tokens);
  take(given.heavy_ratio, options.heavy_ratio);
  take(given.recent_ratio, options.recent_ratio);
}

LayerBudget Budget::OfLayer(int layer) const {
  if (!layers.empty()) return layers[layer];
  return {.budget_tokens = budget_tokens,
          .recent_tokens = recent_tokens,
          .prompt_budget_tokens = prompt_budget_tokens};
}

absl::StatusOr<Budget> ResolveBudget(const PolicyOptions& options, int64_t prompt_tokens,
                                     int num_layers) {
  HW_RETURN_IF_ERROR(Check(options, prompt_tokens));
  const TokenBudget tokens = ResolveTokens(options, prompt_tokens);
  switch (options.policy) {
    case Policy::kFull:
      return FullBudget();
    case Policy::kStreaming:
      return StreamingBudget(options, tokens);
    case Policy::kH2o:
      return H2oBudget(options, tokens);
    case Policy::kSnapKv:
      return SnapKvBudget(options, tokens, prompt_tokens);
    case Policy::kSnapKvH2o:
      return SnapKvH2oBudget(options, tokens, prompt_tokens);
    case Policy::kScissorhands:
      return ScissorhandsBudget(options, tokens, prompt_tokens);
    case Policy::kPyramidKv:
      return PyramidKvBudget(options, tokens, prompt_tokens, num_layers);
    case Policy::kOracle:
      return OracleBudget(options, tokens);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("policy is ", static_cast<int>(options.policy), ", which is none"));
}

}  // namespace heavywater
