// Names of policies and scopes, and the presets.
#include <array>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "worker/policy/policy.h"

namespace heavywater {
namespace {

constexpr std::string_view kRecallPreset = "recall";

template <typename T>
using Named = std::pair<T, std::string_view>;

constexpr std::array kPolicies = {
    Named<Policy>{Policy::kFull, "full"},
    Named<Policy>{Policy::kStreaming, "streaming"},
    Named<Policy>{Policy::kH2o, "h2o"},
    Named<Policy>{Policy::kSnapKv, "snapkv"},
    Named<Policy>{Policy::kSnapKvH2o, "snapkv_h2o"},
    Named<Policy>{Policy::kScissorhands, "scissorhands"},
    Named<Policy>{Policy::kPyramidKv, "pyramidkv"},
    Named<Policy>{Policy::kOracle, "oracle"},
};

constexpr std::array kScopes = {
    Named<Scope>{Scope::kLayer, "layer"},
    Named<Scope>{Scope::kKvHead, "kv_head"},
};

constexpr std::array kHeadBudgets = {
    Named<HeadBudgets>{HeadBudgets::kEven, "even"},
    Named<HeadBudgets>{HeadBudgets::kAdaptive, "adaptive"},
};

constexpr std::array kPositions = {
    Named<Positions>{Positions::kAbsolute, "absolute"},
    Named<Positions>{Positions::kCacheRelative, "cache_relative"},
};

template <typename T, size_t n>
std::string_view NameIn(const std::array<Named<T>, n>& table, T value) {
  for (const auto& [candidate, name] : table) {
    if (candidate == value) return name;
  }
  HW_CHECK(false && "value without a name");
  return "";
}

template <typename T, size_t n>
absl::StatusOr<T> ParseIn(const std::array<Named<T>, n>& table, const char* what,
                          std::string_view name, std::string_view also = "") {
  std::string names;
  for (const auto& [value, candidate] : table) {
    if (candidate == name) return value;
    names += (names.empty() ? "" : ", ") + std::string(candidate);
  }
  return absl::InvalidArgumentError(absl::StrCat(what, " is \"", std::string(name),
                                                 "\", want one of: ", names, std::string(also)));
}

// The tuned preset: everything that leaves the device stays in reach of queries.
PolicyOptions RecallPreset() {
  PolicyOptions options;
  options.policy = Policy::kSnapKvH2o;
  options.recall.enabled = true;
  options.sink_tokens = 4;
  options.recent_tokens = 32;
  options.device_ratio = 0.2;
  options.pooled_seeds = true;
  options.plan_interval_steps = 16;
  options.decay = 0.9;
  return options;
}

}  // namespace

std::string_view PolicyName(Policy policy) { return NameIn(kPolicies, policy); }
absl::StatusOr<Policy> ParsePolicy(std::string_view name) {
  return ParseIn(kPolicies, "policy", name);
}
std::string_view ScopeName(Scope scope) { return NameIn(kScopes, scope); }
absl::StatusOr<Scope> ParseScope(std::string_view name) { return ParseIn(kScopes, "scope", name); }
std::string_view HeadBudgetsName(HeadBudgets budgets) { return NameIn(kHeadBudgets, budgets); }
absl::StatusOr<HeadBudgets> ParseHeadBudgets(std::string_view name) {
  return ParseIn(kHeadBudgets, "head_budgets", name);
}
std::string_view PositionsName(Positions positions) { return NameIn(kPositions, positions); }
absl::StatusOr<Positions> ParsePositions(std::string_view name) {
  return ParseIn(kPositions, "positions", name);
}

absl::StatusOr<PolicyOptions> Preset(std::string_view name) {
  if (name == kRecallPreset) return RecallPreset();
  const absl::StatusOr<Policy> policy = ParseIn(kPolicies, "preset", name, ", recall");
  if (!policy.ok()) return policy.status();
  PolicyOptions options;
  options.policy = *policy;
  if (*policy == Policy::kStreaming) options.sink_tokens = 4;      // as published
  if (*policy == Policy::kH2o) options.min_budget_tokens = 1;      // as published: no floor
  if (*policy == Policy::kOracle) options.scope = Scope::kKvHead;  // each head chooses for itself
  if (*policy == Policy::kScissorhands) {
    options.recent_tokens = 10;  // as published; what the others call recent is pivotal here
    options.heavy_ratio = 0.2;
    options.plan_interval_steps = 16;
  }
  return options;
}

}  // namespace heavywater
