// The end of a prompt's layer where scores divide its slots among the KV heads.
#include <algorithm>
#include <vector>

#include "cache_service/base/status.h"
#include "worker/backend/pooling.h"
#include "worker/policy/head_budgets.h"
#include "worker/rank/prompt_layer.h"

namespace heavywater {
namespace {

// One KV head of a layer whose heads have sets of their own.
LayerView HeadView(const KvShape& shape, const LayerView& layer, int head) {
  const int64_t bytes = layer.capacity * shape.head_dim * ElementBytes(shape.dtype);
  const auto row = [&](auto span) { return span.Sub(head * layer.capacity, layer.capacity); };
  return {.keys = layer.keys.Sub(head * bytes, bytes),
          .values = layer.values.Sub(head * bytes, bytes),
          .positions = row(layer.positions),
          .scores = row(layer.scores),
          .gains = row(layer.gains),
          .num_sets = 1,
          .capacity = layer.capacity,
          .used = layer.used};
}

}  // namespace

// What this rank's Ranking() is for its own heads, here for the heads of all ranks: integers
// that every rank has alike.
absl::StatusOr<std::vector<int64_t>> PromptLayer::KeptOfHeads(int layer) const {
  const Budget& budget = sequence_.budget();
  const PolicyOptions& policy = sequence_.options().policy;
  const int num_heads = region_.sets.rows();
  HW_ASSIGN_OR_RETURN(std::vector<int64_t> scores,
                      ToHost(region_.Blocks(sums_.As<int64_t>(), 0, 1)));
  const auto before = static_cast<size_t>(num_tokens_ - budget.window);
  if (!budget.window_votes) Expose(scores);
  for (int head = 0; head < num_heads && budget.window_votes; ++head) {
    const std::span<int64_t> row = std::span(scores).subspan(head * num_tokens_, num_tokens_);
    std::vector<int64_t> votes(row.size(), 0);  // none on the window's own columns
    PoolRow(row.first(before), budget.pooling, budget.pool_kernel, votes.data());
    std::copy(votes.begin(), votes.end(), row.begin());
  }
  const int64_t kept = ProtectedAtPrompt(budget);
  const HeadScores heads = {.scores = scores,
                            .num_heads = num_heads,
                            .num_tokens = num_tokens_,
                            .first = budget.sink_tokens,
                            .end = num_tokens_ - budget.prompt_recent_tokens};
  std::vector<int64_t> slots = DivideSlots(heads, budget.OfLayer(layer).prompt_budget_tokens - kept,
                                           policy.head_budget_floor);
  for (int64_t& of_head : slots) of_head += kept;
  return slots;
}

absl::Status PromptLayer::CompressHeads(int layer) {
  const KvShape& shape = cache_.options().shape;
  const BlockLayout& blocks = sequence_.blocks();
  const LayerView whole = View(layer, num_tokens_);
  const LayerBudget even = sequence_.budget().OfLayer(layer);
  const bool divides = PromptKept(even, num_tokens_) < num_tokens_;
  std::vector<int64_t> slots;  // of all heads of the model
  DeviceSpan<const int64_t> ranking;
  if (divides) {
    HW_ASSIGN_OR_RETURN(slots, KeptOfHeads(layer));
    HW_ASSIGN_OR_RETURN(ranking, Ranking());
  }
  std::vector<std::vector<Position>> kept(blocks.per_layer);
  for (int head = 0; head < blocks.per_layer; ++head) {
    const int block = blocks.BlockOf(layer, head);
    DeviceSpan<const int64_t> own;
    if (divides) {
      const int64_t of_head = slots[region_.sets.first_own + head];
      sequence_.SetBudget(block, BudgetOfHead(even, sequence_.budget().sink_tokens, of_head));
      own = ranking.Sub(head * num_tokens_, num_tokens_);
    }
    HW_ASSIGN_OR_RETURN(kept[head],
                        ChooseKept(HeadView(shape, whole, head), own, sequence_.BudgetOf(block)));
  }
  // After every choice: seeds may take the ranking's memory.
  HW_ASSIGN_OR_RETURN(const DeviceSpan<const int64_t> seeds, Seeds());
  for (int head = 0; head < blocks.per_layer; ++head) {
    HW_RETURN_IF_ERROR(sequence_.AddPromptBlock(HeadView(shape, whole, head), kept[head],
                                                seeds.Sub(head * num_tokens_, num_tokens_),
                                                /*demoted_scores=*/{}));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
