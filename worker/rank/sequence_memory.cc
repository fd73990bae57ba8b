#include "worker/rank/sequence_memory.h"

#include <algorithm>

#include "worker/cache/kv_layout.h"
#include "worker/rank/recall_memory.h"

namespace heavywater {
namespace {

int64_t RoundUp(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

int64_t AgreementBytes(const RankCacheOptions& options, int64_t num_fields) {
  return num_fields * options.world_size * int64_t{sizeof(int64_t)};
}

// Of a set in one plan: what the slots hold beyond the budget, and one for each
// position that comes back.
int64_t MaxVictims(const RankCacheOptions& options, const Budget& budget,
                   const PolicyOptions& policy, int64_t capacity) {
  const int64_t excess =
      std::max<int64_t>(capacity - budget.budget_tokens, policy.plan_interval_steps);
  return excess + (policy.recall.enabled ? MaxCandidates(options, policy) : 0);
}

int64_t StepBytes(const RankCacheOptions& options, const ScratchSizes& scratch_sizes,
                  const Budget& budget, const SequenceOptions& sequence, int64_t capacity) {
  const SetLayout sets = SetLayoutOf(options, sequence.policy.scope);
  const int64_t logits = int64_t{options.vocab_size} * int64_t{sizeof(float)};
  const int64_t scratch =
      scratch_sizes.AttendScratchBytes(options.shape, capacity, RecallLimitsOf(options, sequence));
  const int64_t always = logits + AgreementBytes(options, kItemFields) + scratch;
  if (!budget.bounded_decode) return always;
  const int64_t slots = options.shape.num_layers * capacity;
  const int64_t row_sums = int64_t{options.shape.num_layers} * sets.rows();
  const int64_t victims = options.shape.num_layers * sets.own_sets *
                          MaxVictims(options, budget, sequence.policy, capacity);
  return always + (slots * sets.rows() + row_sums) * int64_t{sizeof(int64_t)} +
         slots * sets.own_sets + victims * int64_t{sizeof(int32_t) + sizeof(int64_t)};
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

int64_t PromptKept(const Budget& budget, int64_t prompt_tokens) {
  if (budget.prompt_budget_tokens == 0) return prompt_tokens;
  return std::min(budget.prompt_budget_tokens, prompt_tokens);
}

int64_t SlotCapacity(const RankCacheOptions& options, const Budget& budget,
                     const SequenceOptions& sequence) {
  const int64_t after_prompt = sequence.max_tokens - sequence.prompt_tokens;
  const int64_t all = PromptKept(budget, sequence.prompt_tokens) + after_prompt;
  if (!budget.bounded_decode) return RoundUp(all, options.shape.page_tokens);
  return std::min(budget.budget_tokens + sequence.policy.plan_interval_steps, all);
}

int64_t PromptHiddenBytes(int64_t prompt_tokens, int hidden_size) {
  return prompt_tokens * hidden_size * int64_t{sizeof(float)};
}

SequenceBytes BytesOf(const RankCacheOptions& options, const ScratchSizes& scratch_sizes,
                      const Budget& budget, const SequenceOptions& sequence, int64_t capacity) {
  const SetLayout sets = SetLayoutOf(options, sequence.policy.scope);
  const int64_t layer = DeviceLayerBytes(options.shape, sets.own_sets, capacity).total();
  const int64_t region =
      RecallRegionOf(options, budget, sequence.policy, 0).size() * int64_t{sizeof(int64_t)};
  return {.layers = layer * options.shape.num_layers,
          .growth = budget.bounded_decode ? 0 : layer,
          .step = StepBytes(options, scratch_sizes, budget, sequence, capacity) + region,
          .prompt = PromptBytes(options, scratch_sizes, sets, sequence),
          .recall = RecallBytesOf(options, budget, sequence, capacity).total()};
}

}  // namespace heavywater
