#include "worker/rank/sequence_memory.h"

#include <algorithm>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "worker/cache/kv_layout.h"
#include "worker/policy/head_budgets.h"
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
int64_t MaxVictims(const RankCacheOptions& options, const PolicyOptions& policy,
                   const BlockSizes& sizes) {
  int64_t excess = policy.plan_interval_steps;
  for (size_t block = 0; block < sizes.capacities.size(); ++block) {
    excess = std::max(excess, sizes.capacities[block] - sizes.budgets[block].budget_tokens);
  }
  return excess + Candidates(options, policy);
}

int64_t StepBytes(const RankCacheOptions& options, const ScratchSizes& scratch_sizes,
                  const Budget& budget, const SequenceOptions& sequence, const BlockSizes& sizes) {
  const std::vector<int64_t>& capacities = sizes.capacities;
  const BlockLayout blocks = BlocksOf(options, sequence.policy);
  const SetLayout& sets = blocks.sets;
  const int64_t capacity = *std::max_element(capacities.begin(), capacities.end());
  const int64_t logits = int64_t{options.vocab_size} * int64_t{sizeof(float)};
  const int64_t scratch =
      scratch_sizes.AttendScratchBytes(blocks.shape, capacity, RecallLimitsOf(options, sequence));
  const int64_t always = logits + AgreementBytes(options, kItemFields) + scratch +
                         OracleBytes(options.shape, budget, capacity);
  if (!budget.bounded_decode) return always;
  const int64_t slots = std::accumulate(capacities.begin(), capacities.end(), int64_t{0});
  const int64_t masks = blocks.num_blocks() * capacity * sets.own_sets;
  const int64_t row_sums = int64_t{blocks.num_blocks()} * sets.rows();
  const int64_t victims =
      blocks.num_blocks() * sets.own_sets * MaxVictims(options, sequence.policy, sizes);
  const int64_t values = sequence.policy.exposure > 0
                             ? sets.own_sets * (capacity + Candidates(options, sequence.policy))
                             : 0;
  return always + (slots * sets.rows() + row_sums + values) * int64_t{sizeof(int64_t)} + masks +
         victims * int64_t{sizeof(int32_t) + sizeof(int64_t)};
}

int64_t PromptBytes(const RankCacheOptions& options, const ScratchSizes& scratch_sizes,
                    const SequenceOptions& sequence) {
  const SetLayout sets = PromptSetsOf(options, sequence.policy);
  const int64_t prompt_tokens = sequence.prompt_tokens;
  const int64_t whole = DeviceLayerBytes(options.shape, sets.own_sets, prompt_tokens).total() *
                        WholeLayers(options.shape, sequence);
  const int64_t sums = (prompt_tokens + 1) * sets.rows() * int64_t{sizeof(int64_t)};
  const int64_t votes = prompt_tokens * sets.own_sets * int64_t{sizeof(int64_t)};
  const int64_t mask = prompt_tokens * sets.own_sets;
  const int64_t scratch = scratch_sizes.PromptScratchBytes(options.shape, prompt_tokens);
  return whole + sums + votes + mask + scratch + AgreementBytes(options, kPromptFields);
}

// Of the blocks of a layer, before the prompt's scores are known.
std::vector<LayerBudget> LargestBudgets(const RankCacheOptions& options, const Budget& budget,
                                        int layer, const SequenceOptions& sequence) {
  const LayerBudget even = budget.OfLayer(layer);
  const BlockLayout blocks = BlocksOf(options, sequence.policy);
  if (!blocks.divided || PromptKept(even, sequence.prompt_tokens) == sequence.prompt_tokens) {
    return std::vector<LayerBudget>(blocks.per_layer, even);
  }
  const int64_t kept = ProtectedAtPrompt(budget);
  std::vector<LayerBudget> largest;
  for (const int64_t slots :
       MostSlots(options.shape.total_kv_heads, options.shape.num_kv_heads,
                 even.prompt_budget_tokens - kept, sequence.prompt_tokens - kept,
                 sequence.policy.head_budget_floor)) {
    largest.push_back(BudgetOfHead(even, budget.sink_tokens, kept + slots));
  }
  return largest;
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

BlockLayout BlocksOf(const RankCacheOptions& options, const PolicyOptions& policy) {
  BlockLayout blocks = {.shape = options.shape, .sets = SetLayoutOf(options, policy.scope)};
  if (policy.head_budgets == HeadBudgets::kEven) return blocks;
  blocks.divided = true;
  blocks.per_layer = options.shape.num_kv_heads;
  blocks.shape.num_query_heads = options.shape.group_size();
  blocks.shape.num_kv_heads = 1;
  blocks.sets = {.own_sets = 1, .reduced_sets = 0};
  return blocks;
}

SetLayout PromptSetsOf(const RankCacheOptions& options, const PolicyOptions& policy) {
  if (policy.head_budgets == HeadBudgets::kEven) return SetLayoutOf(options, policy.scope);
  return {.own_sets = options.shape.num_kv_heads,
          .reduced_sets = options.shape.total_kv_heads,
          .first_own = options.shape.first_kv_head};
}

absl::Status CheckHeadBudgets(const RankCacheOptions& options, const PolicyOptions& policy) {
  if (policy.head_budgets == HeadBudgets::kEven || options.ranks_per_kv_head() == 1) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "head_budgets is adaptive, but ", options.world_size, " ranks share the model's ",
      options.shape.total_kv_heads, " KV heads; want at most as many ranks as KV heads"));
}

int64_t ProtectedAtPrompt(const Budget& budget) {
  return budget.sink_tokens + budget.prompt_recent_tokens;
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

void BlockSizes::Set(int block, const LayerBudget& budget, const RankCacheOptions& options,
                     const SequenceOptions& sequence) {
  budgets[block] = budget;
  const int64_t all =
      PromptKept(budget, sequence.prompt_tokens) + sequence.max_tokens - sequence.prompt_tokens;
  const bool bounded = budget.budget_tokens > 0;
  capacities[block] =
      bounded ? std::min(budget.budget_tokens + sequence.policy.plan_interval_steps, all)
              : RoundUp(all, options.shape.page_tokens);
}

BlockSizes LargestSizes(const RankCacheOptions& options, const Budget& budget,
                        const SequenceOptions& sequence) {
  const BlockLayout blocks = BlocksOf(options, sequence.policy);
  BlockSizes sizes;
  sizes.budgets.resize(blocks.num_blocks());
  sizes.capacities.resize(blocks.num_blocks());
  for (int layer = 0; layer < options.shape.num_layers; ++layer) {
    const std::vector<LayerBudget> largest = LargestBudgets(options, budget, layer, sequence);
    for (int i = 0; i < blocks.per_layer; ++i) {
      const int block = layer * blocks.per_layer + i;
      sizes.Set(block, largest[i], options, sequence);
      // Whole pages: another division may round up more of its blocks.
      const bool whole_pages = blocks.divided && largest[i].budget_tokens == 0;
      if (whole_pages) sizes.capacities[block] += options.shape.page_tokens;
    }
  }
  return sizes;
}

int64_t PromptHiddenBytes(int64_t prompt_tokens, int hidden_size) {
  return prompt_tokens * hidden_size * int64_t{sizeof(float)};
}

SequenceBytes BytesOf(const RankCacheOptions& options, const ScratchSizes& scratch_sizes,
                      const Budget& budget, const SequenceOptions& sequence,
                      const BlockSizes& sizes) {
  const std::vector<int64_t>& capacities = sizes.capacities;
  const BlockLayout blocks = BlocksOf(options, sequence.policy);
  const int own_sets = blocks.sets.own_sets;
  const int64_t capacity = *std::max_element(capacities.begin(), capacities.end());
  int64_t layers = 0;
  for (const int64_t slots : capacities) {
    layers += DeviceLayerBytes(blocks.shape, own_sets, slots).total();
  }
  const int64_t layer = DeviceLayerBytes(blocks.shape, own_sets, capacity).total();
  const int64_t region =
      RecallRegionOf(options, budget, sequence.policy, 0, MaxRegionPages(options, sequence))
          .size() *
      int64_t{sizeof(int64_t)};
  const PlaceBytes places = PlaceBytesOf(options, sequence, capacities);
  return {.layers = layers,
          .growth = budget.bounded_decode ? 0 : layer,
          .step = StepBytes(options, scratch_sizes, budget, sequence, sizes) + region + places.step,
          .prompt = PromptBytes(options, scratch_sizes, sequence) + places.prompt,
          .recall = RecallBytesOf(options, budget, sequence, capacity).total(),
          .angles = places.angles};
}

}  // namespace heavywater
