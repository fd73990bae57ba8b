#include "worker/rank/sequence_memory.h"

#include <algorithm>
#include <numeric>

#include "worker/cache/kv_layout.h"
#include "worker/rank/cache_places.h"
#include "worker/rank/oracle_attention.h"
#include "worker/rank/recall_memory.h"

namespace heavywater {
namespace {

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t AgreementBytes(const RankCacheOptions& options, int64_t num_fields) {
  return num_fields * options.world_size * int64_t{sizeof(int64_t)};
}

int64_t Candidates(const RankCacheOptions& options, const PolicyOptions& policy) {
  return policy.recall.enabled ? MaxCandidates(options, policy) : 0;
}

// Of a set in one plan: what the slots hold beyond the budget, and one for each
// position that comes back.
int64_t MaxVictims(const RankCacheOptions& options, const Budget& budget,
                   const PolicyOptions& policy, std::span<const int64_t> capacities) {
  int64_t excess = policy.plan_interval_steps;
  for (size_t layer = 0; layer < capacities.size(); ++layer) {
    excess = std::max(excess, capacities[layer] - budget.OfLayer(layer).budget_tokens);
  }
  return excess + Candidates(options, policy);
}

int64_t StepBytes(const RankCacheOptions& options, const ScratchSizes& scratch_sizes,
                  const Budget& budget, const SequenceOptions& sequence,
                  std::span<const int64_t> capacities) {
  const SetLayout sets = SetLayoutOf(options, sequence.policy.scope);
  const int64_t capacity = *std::max_element(capacities.begin(), capacities.end());
  const int64_t logits = int64_t{options.vocab_size} * int64_t{sizeof(float)};
  const int64_t scratch =
      scratch_sizes.AttendScratchBytes(options.shape, capacity, RecallLimitsOf(options, sequence));
  const int64_t always = logits + AgreementBytes(options, kItemFields) + scratch +
                         OracleBytes(options.shape, budget, capacity);
  if (!budget.bounded_decode) return always;
  const int64_t slots = std::accumulate(capacities.begin(), capacities.end(), int64_t{0});
  const int64_t masks = options.shape.num_layers * capacity * sets.own_sets;
  const int64_t row_sums = int64_t{options.shape.num_layers} * sets.rows();
  const int64_t victims = options.shape.num_layers * sets.own_sets *
                          MaxVictims(options, budget, sequence.policy, capacities);
  const int64_t values = sequence.policy.exposure > 0
                             ? sets.own_sets * (capacity + Candidates(options, sequence.policy))
                             : 0;
  return always + (slots * sets.rows() + row_sums + values) * int64_t{sizeof(int64_t)} + masks +
         victims * int64_t{sizeof(int32_t) + sizeof(int64_t)};
}

int64_t PromptBytes(const RankCacheOptions& options, const ScratchSizes& scratch_sizes,
                    const SetLayout& sets, const SequenceOptions& sequence) {
  const int64_t prompt_tokens = sequence.prompt_tokens;
  const int64_t whole = DeviceLayerBytes(options.shape, sets.own_sets, prompt_tokens).total() *
                        WholeLayers(options.shape, sequence);
  const int64_t sums = (prompt_tokens + 1) * sets.rows() * int64_t{sizeof(int64_t)};
  const int64_t votes = prompt_tokens * sets.own_sets * int64_t{sizeof(int64_t)};
  const int64_t mask = prompt_tokens * sets.own_sets;
  const int64_t scratch = scratch_sizes.PromptScratchBytes(options.shape, prompt_tokens);
  return whole + sums + votes + mask + scratch + AgreementBytes(options, kPromptFields);
}

}  // namespace

SetLayout SetLayoutOf(const RankCacheOptions& options, Scope scope) {
  if (scope == Scope::kLayer) return SetLayout();
  const KvShape& shape = options.shape;
  const bool shared = options.ranks_per_kv_head() > 1;
  return {.own_sets = shape.num_kv_heads,
          .reduced_sets = shared ? shape.total_kv_heads : 0,
          .first_own = shared ? shape.first_kv_head : 0};
}

int HashGroup(const RankCacheOptions& options, Scope scope) {
  return scope == Scope::kLayer ? options.world_size : options.ranks_per_kv_head();
}

int WholeLayers(const KvShape& shape, const SequenceOptions& sequence) {
  return sequence.prompt_in_steps ? shape.num_layers : 1;
}

int64_t PromptKept(const LayerBudget& budget, int64_t prompt_tokens) {
  if (budget.prompt_budget_tokens == 0) return prompt_tokens;
  return std::min(budget.prompt_budget_tokens, prompt_tokens);
}

std::vector<int64_t> SlotCapacities(const RankCacheOptions& options, const Budget& budget,
                                    const SequenceOptions& sequence) {
  const int64_t after_prompt = sequence.max_tokens - sequence.prompt_tokens;
  std::vector<int64_t> capacities;
  for (int layer = 0; layer < options.shape.num_layers; ++layer) {
    const LayerBudget of_layer = budget.OfLayer(layer);
    const int64_t all = PromptKept(of_layer, sequence.prompt_tokens) + after_prompt;
    capacities.push_back(
        budget.bounded_decode
            ? std::min(of_layer.budget_tokens + sequence.policy.plan_interval_steps, all)
            : RoundUp(all, options.shape.page_tokens));
  }
  return capacities;
}

int64_t PromptHiddenBytes(int64_t prompt_tokens, int hidden_size) {
  return prompt_tokens * hidden_size * int64_t{sizeof(float)};
}

SequenceBytes BytesOf(const RankCacheOptions& options, const ScratchSizes& scratch_sizes,
                      const Budget& budget, const SequenceOptions& sequence,
                      std::span<const int64_t> capacities) {
  const SetLayout sets = SetLayoutOf(options, sequence.policy.scope);
  const int64_t capacity = *std::max_element(capacities.begin(), capacities.end());
  int64_t layers = 0;
  for (const int64_t slots : capacities) {
    layers += DeviceLayerBytes(options.shape, sets.own_sets, slots).total();
  }
  const int64_t layer = DeviceLayerBytes(options.shape, sets.own_sets, capacity).total();
  const int64_t region =
      RecallRegionOf(options, budget, sequence.policy, 0).size() * int64_t{sizeof(int64_t)};
  const PlaceBytes places = PlaceBytesOf(options, sequence, capacities);
  return {.layers = layers,
          .growth = budget.bounded_decode ? 0 : layer,
          .step = StepBytes(options, scratch_sizes, budget, sequence, capacities) + region +
                  places.step,
          .prompt = PromptBytes(options, scratch_sizes, sets, sequence) + places.prompt,
          .recall = RecallBytesOf(options, budget, sequence, capacity).total(),
          .angles = places.angles};
}

}  // namespace heavywater
