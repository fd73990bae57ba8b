#include "worker/server/policy_proto.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

absl::StatusOr<Pooling> ParsePooling(const std::string& name) {
  if (name == "average") return Pooling::kAverage;
  if (name == "max") return Pooling::kMax;
  if (name == "none") return Pooling::kNone;
  return absl::InvalidArgumentError(
      absl::StrCat("policy.pooling is \"", name, "\", want average, max or none"));
}

std::string PoolingName(Pooling pooling) {
  switch (pooling) {
    case Pooling::kAverage:
      return "average";
    case Pooling::kMax:
      return "max";
    case Pooling::kNone:
      break;
  }
  return "none";
}

// Takes a field where it is set; a value below 0 or not a number is refused.
template <typename To, typename From>
absl::Status TakeField(const char* field, From got, To& option) {
  if (!(got >= 0) || std::isinf(static_cast<double>(got))) {
    return absl::InvalidArgumentError(
        absl::StrCat("policy.", field, " is ", got, ", want a number of 0 (the default) or more"));
  }
  if (got != 0) option = got;
  return absl::OkStatus();
}

absl::Status TakeBudget(const v1::PolicyOptions& proto, PolicyOptions& options) {
  GivenBudget given;
  HW_RETURN_IF_ERROR(TakeField("heavy_tokens", proto.heavy_tokens(), given.heavy_tokens));
  HW_RETURN_IF_ERROR(TakeField("recent_tokens", proto.recent_tokens(), given.recent_tokens));
  HW_RETURN_IF_ERROR(TakeField("heavy_ratio", proto.heavy_ratio(), given.heavy_ratio));
  HW_RETURN_IF_ERROR(TakeField("recent_ratio", proto.recent_ratio(), given.recent_ratio));
  if (proto.has_device_ratio()) given.device_ratio = proto.device_ratio();
  ReplaceBudget(given, options);
  return absl::OkStatus();
}

absl::Status TakeNumbers(const v1::PolicyOptions& proto, PolicyOptions& options) {
  HW_RETURN_IF_ERROR(
      TakeField("min_budget_tokens", proto.min_budget_tokens(), options.min_budget_tokens));
  HW_RETURN_IF_ERROR(TakeField("window", proto.window(), options.window));
  HW_RETURN_IF_ERROR(TakeField("pool_kernel", proto.pool_kernel(), options.pool_kernel));
  HW_RETURN_IF_ERROR(
      TakeField("plan_interval_steps", proto.plan_interval_steps(), options.plan_interval_steps));
  HW_RETURN_IF_ERROR(TakeField("exposure", proto.exposure(), options.exposure));
  HW_RETURN_IF_ERROR(TakeField("history_window", proto.history_window(), options.history_window));
  HW_RETURN_IF_ERROR(TakeField("pyramid_beta", proto.pyramid_beta(), options.pyramid_beta));
  return TakeField("decay", proto.decay(), options.decay);
}

// Whether these numbers can be is ResolveBudget()'s to say.
absl::Status TakeRecall(const v1::PolicyOptions& proto, PolicyOptions& options) {
  RecallOptions& recall = options.recall;
  if (proto.has_recall()) recall.enabled = proto.recall();
  if (proto.has_recall_all()) recall.all = proto.recall_all();
  if (proto.has_recall_wait()) recall.wait = proto.recall_wait();
  if (proto.has_recall_min_share()) recall.min_share = proto.recall_min_share();
  if (proto.has_promote_candidates()) recall.promote_candidates = proto.promote_candidates();
  if (proto.has_pooled_seeds()) options.pooled_seeds = proto.pooled_seeds();
  HW_RETURN_IF_ERROR(TakeField("recall_tokens", proto.recall_tokens(), recall.recall_tokens));
  return TakeField("sketch_channels", proto.sketch_channels(), recall.sketch_channels);
}

}  // namespace

absl::StatusOr<PolicyOptions> PolicyFromProto(const v1::PolicyOptions& proto,
                                              const std::string& unnamed) {
  auto preset = Preset(proto.policy().empty() ? unnamed : proto.policy());
  if (!preset.ok()) {
    return absl::Status(preset.status().code(),
                        absl::StrCat("policy.policy: ", preset.status().message()));
  }
  PolicyOptions options = *std::move(preset);
  if (!proto.scope().empty()) {
    auto scope = ParseScope(proto.scope());
    if (!scope.ok()) {
      return absl::Status(scope.status().code(),
                          absl::StrCat("policy.scope: ", scope.status().message()));
    }
    options.scope = *scope;
  }
  if (!proto.positions().empty()) {
    auto positions = ParsePositions(proto.positions());
    if (!positions.ok()) {
      return absl::Status(positions.status().code(),
                          absl::StrCat("policy.positions: ", positions.status().message()));
    }
    options.positions = *positions;
  }
  if (!proto.head_budgets().empty()) {
    auto head_budgets = ParseHeadBudgets(proto.head_budgets());
    if (!head_budgets.ok()) {
      return absl::Status(head_budgets.status().code(),
                          absl::StrCat("policy.head_budgets: ", head_budgets.status().message()));
    }
    options.head_budgets = *head_budgets;
  }
  if (proto.has_head_budget_floor()) options.head_budget_floor = proto.head_budget_floor();
  if (!proto.pooling().empty()) {
    HW_ASSIGN_OR_RETURN(options.pooling, ParsePooling(proto.pooling()));
  }
  HW_RETURN_IF_ERROR(TakeBudget(proto, options));
  HW_RETURN_IF_ERROR(TakeNumbers(proto, options));
  HW_RETURN_IF_ERROR(TakeRecall(proto, options));
  if (proto.has_sink_tokens()) options.sink_tokens = proto.sink_tokens();
  if (options.sink_tokens < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("policy.sink_tokens is ", options.sink_tokens, ", want 0 or more"));
  }
  return options;
}

v1::PolicyOptions PolicyToProto(const PolicyOptions& options) {
  v1::PolicyOptions proto;
  proto.set_policy(std::string(PolicyName(options.policy)));
  proto.set_scope(std::string(ScopeName(options.scope)));
  proto.set_heavy_tokens(options.heavy_tokens);
  proto.set_recent_tokens(options.recent_tokens);
  proto.set_heavy_ratio(options.heavy_ratio);
  proto.set_recent_ratio(options.recent_ratio);
  proto.set_sink_tokens(options.sink_tokens);
  proto.set_min_budget_tokens(options.min_budget_tokens);
  proto.set_window(options.window);
  proto.set_pooling(PoolingName(options.pooling));
  proto.set_pool_kernel(options.pool_kernel);
  proto.set_plan_interval_steps(options.plan_interval_steps);
  proto.set_decay(options.decay);
  proto.set_exposure(options.exposure);
  proto.set_history_window(options.history_window);
  proto.set_pyramid_beta(options.pyramid_beta);
  proto.set_recall(options.recall.enabled);
  proto.set_recall_wait(options.recall.wait);
  proto.set_recall_all(options.recall.all);
  proto.set_recall_tokens(options.recall.recall_tokens);
  proto.set_recall_min_share(options.recall.min_share);
  proto.set_sketch_channels(options.recall.sketch_channels);
  proto.set_promote_candidates(options.recall.promote_candidates);
  proto.set_device_ratio(options.device_ratio);
  proto.set_pooled_seeds(options.pooled_seeds);
  proto.set_positions(std::string(PositionsName(options.positions)));
  proto.set_head_budgets(std::string(HeadBudgetsName(options.head_budgets)));
  proto.set_head_budget_floor(options.head_budget_floor);
  return proto;
}

v1::ResolvedBudget BudgetToProto(const PolicyOptions& options, const Budget& budget) {
  v1::ResolvedBudget proto;
  proto.set_policy(std::string(PolicyName(options.policy)));
  proto.set_scope(std::string(ScopeName(options.scope)));
  proto.set_budget_tokens(budget.budget_tokens);
  proto.set_sink_tokens(budget.sink_tokens);
  proto.set_recent_tokens(budget.recent_tokens);
  proto.set_bounded_decode(budget.bounded_decode);
  proto.set_plan_interval_steps(options.plan_interval_steps);
  proto.set_decay(options.decay);
  proto.set_device_ratio(options.device_ratio);
  proto.set_pooled_seeds(options.pooled_seeds);
  proto.set_exposure(options.exposure);
  proto.set_positions(std::string(PositionsName(options.positions)));
  proto.set_attended_tokens(budget.attended_tokens);
  proto.set_head_budgets(std::string(HeadBudgetsName(options.head_budgets)));
  if (options.head_budgets == HeadBudgets::kAdaptive) {
    proto.set_head_budget_floor(options.head_budget_floor);
  }
  if (options.policy == Policy::kScissorhands) proto.set_history_window(options.history_window);
  if (options.policy == Policy::kPyramidKv) proto.set_pyramid_beta(options.pyramid_beta);
  for (const LayerBudget& layer : budget.layers) {
    proto.add_layer_budget_tokens(layer.budget_tokens);
    proto.add_layer_recent_tokens(layer.recent_tokens);
  }
  if (!options.recall.enabled) return proto;
  proto.set_recall(true);
  proto.set_recall_wait(options.recall.wait);
  proto.set_recall_all(options.recall.all);
  proto.set_recall_tokens(options.recall.recall_tokens);
  proto.set_recall_min_share(options.recall.min_share);
  proto.set_sketch_channels(options.recall.sketch_channels);
  proto.set_promote_candidates(options.recall.promote_candidates);
  return proto;
}

absl::StatusOr<OnHostFull> ParseOnHostFull(const std::string& name) {
  if (name == "stop") return OnHostFull::kStop;
  if (name == "drop") return OnHostFull::kDrop;
  return absl::InvalidArgumentError(
      absl::StrCat("on_host_full is \"", name, "\", want stop or drop"));
}

}  // namespace heavywater
