#include "cache_service/registry/plan_sets.h"

#include <algorithm>

#include "cache_service/registry/set_messages.h"

namespace heavywater {
namespace {

constexpr double kScoreUnit = 1.0 / (int64_t{1} << 32);

// Not in the host tier for this set's heads, resident or not.
TokenRanges DroppedFor(const ReportedPlan& plan, int kv_head, const ResidentPositions& resident) {
  if (kv_head >= 0) return plan.dropped[resident.rank];
  // A layer's set covers the heads of all ranks: a position that one of them
  // could not store cannot be recalled as a whole.
  TokenRanges dropped;
  for (const TokenRanges& ranges : plan.dropped) dropped = Union(dropped, ranges);
  return dropped;
}

struct NotResident {
  TokenRanges demoted;
  TokenRanges dropped;
};

NotResident Split(const ReportedPlan& plan, int kv_head, const ResidentPositions& resident) {
  const TokenRanges gone = Complement(resident.positions, plan.tokens_seen);
  const TokenRanges unstored = DroppedFor(plan, kv_head, resident);
  return {Subtract(gone, unstored), Intersect(gone, unstored)};
}

void AddResident(const ResidentPositions& resident, int64_t recent_begin,
                 const v1::ResolvedBudget& budget, v1::SequenceSet* set) {
  std::vector<double> heavy_scores;
  std::vector<double> recent_scores;
  for (size_t i = 0; i < resident.positions.size(); ++i) {
    const int64_t position = resident.positions[i];
    const double score = static_cast<double>(resident.scores[i]) * kScoreUnit;
    if (position < budget.sink_tokens()) {
      set->add_sinks(position);
      set->add_scores(score);
    } else if (position >= recent_begin) {
      set->add_recent(position);
      recent_scores.push_back(score);
    } else {
      set->add_heavy(position);
      heavy_scores.push_back(score);
    }
  }
  set->mutable_scores()->Add(heavy_scores.begin(), heavy_scores.end());
  set->mutable_scores()->Add(recent_scores.begin(), recent_scores.end());
}

// Where KV heads have budgets of their own, recent is the same share of each.
int64_t RecentTokens(const v1::ResolvedBudget& budget, int layer, int64_t kept) {
  const bool by_layer = layer < budget.layer_recent_tokens_size();
  const int64_t recent = by_layer ? budget.layer_recent_tokens(layer) : budget.recent_tokens();
  if (budget.head_budgets() != "adaptive" || budget.budget_tokens() == 0) return recent;
  const int64_t even = layer < budget.layer_budget_tokens_size() ? budget.layer_budget_tokens(layer)
                                                                 : budget.budget_tokens();
  return std::max<int64_t>(recent * kept / std::max<int64_t>(even, 1), 1);
}

}  // namespace

std::vector<v1::SequenceSet> SplitSets(const ReportedPlan& plan, const v1::ResolvedBudget& budget,
                                       const google::protobuf::RepeatedField<int32_t>& layers) {
  std::vector<v1::SequenceSet> sets;
  for (const auto& [key, resident] : plan.sets) {
    const auto [layer, kv_head] = key;
    if (!layers.empty() && std::find(layers.begin(), layers.end(), layer) == layers.end()) {
      continue;
    }
    v1::SequenceSet set;
    set.set_layer(layer);
    set.set_kv_head(kv_head);
    set.set_plan(plan.number);
    set.set_tokens_seen(plan.tokens_seen);
    set.set_plan_hash(plan.hash);
    const auto kept = static_cast<int64_t>(resident.positions.size());
    AddResident(resident, plan.tokens_seen - RecentTokens(budget, layer, kept), budget, &set);
    const NotResident gone = Split(plan, kv_head, resident);
    AppendFlat(gone.demoted, set.mutable_demoted_ranges());
    AppendFlat(gone.dropped, set.mutable_dropped_ranges());
    AppendMessages(set, &sets);
  }
  return sets;
}

v1::SequenceCounts CountSets(const ReportedPlan& plan) {
  v1::SequenceCounts counts;
  counts.set_tokens_seen(plan.tokens_seen);
  double resident_sum = 0;
  double demoted_sum = 0;
  double dropped_sum = 0;
  for (const auto& [key, resident] : plan.sets) {
    const NotResident gone = Split(plan, key.second, resident);
    resident_sum += static_cast<double>(resident.positions.size());
    demoted_sum += static_cast<double>(CountTokens(gone.demoted));
    dropped_sum += static_cast<double>(CountTokens(gone.dropped));
  }
  const double num_sets = std::max<double>(1, static_cast<double>(plan.sets.size()));
  counts.set_tokens_resident(resident_sum / num_sets);
  counts.set_tokens_demoted(demoted_sum / num_sets);
  counts.set_tokens_dropped(dropped_sum / num_sets);
  return counts;
}

}  // namespace heavywater
