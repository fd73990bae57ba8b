#include "worker/rank/recall_memory.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

int64_t PagesFor(int64_t tokens, int64_t page_tokens) {
  return (tokens + page_tokens - 1) / page_tokens;
}

// Of one KV head whose set is its own.
int64_t SlotBytes(const KvShape& shape) {
  return shape.row_bytes() + 2 * int64_t{sizeof(int64_t)} + int64_t{sizeof(Position)};
}

int64_t SketchBytes(const SketchShape& sketch, int64_t tokens) {
  const int64_t pages = PagesFor(tokens, sketch.page_tokens);
  return pages * (sketch.page_bytes() + sketch.page_tokens / 8) + sketch.channels;
}

}  // namespace

SketchShape SketchShapeOf(const KvShape& shape, const PolicyOptions& policy) {
  SketchShape sketch{.head_dim = shape.head_dim,
                     .channels = policy.recall.sketch_channels,
                     .page_tokens = shape.page_tokens};
  if (sketch.channels > 0) return sketch;
  sketch.channels = DefaultSketchChannels(shape.head_dim);
  const double page_bytes =
      policy.device_ratio * static_cast<double>(shape.page_tokens * shape.row_bytes());
  const bool fits = 2 * static_cast<double>(SketchBytes(sketch, shape.page_tokens)) <= page_bytes;
  if (policy.device_ratio > 0 && !fits) sketch.channels = QuarterSketchChannels(shape.head_dim);
  return sketch;
}

absl::Status CheckRecall(const RankCacheOptions& options, const SequenceOptions& sequence,
                         bool has_host_tier) {
  if (!sequence.policy.recall.enabled) return absl::OkStatus();
  if (options.ranks_per_kv_head() > 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "recall is on, but ", options.world_size, " ranks share the model's ",
        options.shape.total_kv_heads, " KV heads; want at most as many ranks as KV heads"));
  }
  HW_RETURN_IF_ERROR(SketchShapeOf(options.shape, sequence.policy).Validate());
  if (has_host_tier) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "recall is on, but this worker has no host tier to read demoted positions from");
}

absl::StatusOr<Budget> ResolveSequenceBudget(const KvShape& shape,
                                             const SequenceOptions& sequence) {
  PolicyOptions policy = sequence.policy;
  const absl::StatusOr<Budget> as_given =
      ResolveBudget(policy, sequence.prompt_tokens, shape.num_layers);
  if (!as_given.ok() || policy.device_ratio <= 0) return as_given;
  const int64_t full =
      PagesFor(sequence.prompt_tokens, shape.page_tokens) * shape.page_tokens * shape.row_bytes();
  auto bytes = static_cast<int64_t>(std::floor(policy.device_ratio * static_cast<double>(full)));
  if (policy.recall.enabled) {
    bytes -= SketchBytes(SketchShapeOf(shape, policy), sequence.prompt_tokens);
  }
  const int64_t slots = bytes / SlotBytes(shape) - policy.plan_interval_steps;
  const int64_t floor =
      std::max<int64_t>({policy.min_budget_tokens - policy.recent_tokens, policy.sink_tokens, 1});
  policy.heavy_tokens = std::max(slots - policy.recent_tokens, floor);
  policy.device_ratio = 0;
  return ResolveBudget(policy, sequence.prompt_tokens, shape.num_layers);
}

bool PromptDemotes(const Budget& budget, int64_t prompt_tokens) {
  if (budget.layers.empty()) return PromptKept(budget.OfLayer(0), prompt_tokens) < prompt_tokens;
  return std::any_of(budget.layers.begin(), budget.layers.end(), [&](const LayerBudget& layer) {
    return PromptKept(layer, prompt_tokens) < prompt_tokens;
  });
}

int64_t MaxCandidates(const RankCacheOptions& options, const PolicyOptions& policy) {
  const int64_t heads = policy.scope == Scope::kLayer ? options.shape.total_kv_heads : 1;
  return heads * policy.recall.promote_candidates;
}

RecallBytes RecallBytesOf(const RankCacheOptions& options, const Budget& budget,
                          const SequenceOptions& sequence, int64_t capacity) {
  if (!sequence.policy.recall.enabled) return RecallBytes();
  const KvShape& shape = options.shape;
  const SketchShape sketch = SketchShapeOf(shape, sequence.policy);
  const int sets = SetLayoutOf(options, sequence.policy.scope).own_sets;
  const int64_t heads = int64_t{shape.num_layers} * shape.num_kv_heads;
  const int64_t pages = PagesFor(sequence.max_tokens, sketch.page_tokens);
  const int64_t candidates = capacity + MaxCandidates(options, sequence.policy);
  // Squares of every layer, also where the prompt needs one at a time: what is
  // reserved never falls as the prompt grows.
  return {.squares = int64_t{shape.num_layers} * shape.num_kv_heads * kSketchQueries *
                     shape.head_dim * int64_t{sizeof(float)},
          .channels = heads * sketch.channels,
          .sketches = heads * pages * sketch.page_bytes(),
          .tables = shape.num_layers * sets * pages * sketch.page_tokens / 8,
          .scratch = sets * candidates * int64_t{sizeof(Position) + sizeof(int64_t)} +
                     shape.num_layers * sets * MaxCandidates(options, sequence.policy)};
}

RecallLimits RecallLimitsOf(const RankCacheOptions& options, const SequenceOptions& sequence) {
  const RecallOptions& recall = sequence.policy.recall;
  if (!recall.enabled) return RecallLimits();
  if (!recall.all) return {.max_picks = recall.recall_tokens};
  const int64_t page = options.shape.page_tokens;
  return {.all_positions = PagesFor(sequence.max_tokens, page) * page};
}

RecallRegion RecallRegionOf(const RankCacheOptions& options, const Budget& budget,
                            const PolicyOptions& policy, int64_t begin, int64_t num_pages) {
  RecallRegion region;
  region.begin = begin;
  if (!policy.recall.enabled || !budget.uses_scores) return region;
  const KvShape& shape = options.shape;
  const SetLayout sets = SetLayoutOf(options, policy.scope);
  const bool reduced = sets.reduced_sets > 0;
  region.num_layers = shape.num_layers;
  region.rows = sets.rows();
  region.num_heads = reduced ? shape.total_kv_heads : shape.num_kv_heads;
  region.first_head = reduced ? shape.first_kv_head : 0;
  region.num_candidates = policy.recall.promote_candidates;
  region.num_pages = num_pages;
  return region;
}

int64_t MaxRegionPages(const RankCacheOptions& options, const SequenceOptions& sequence) {
  const PolicyOptions& policy = sequence.policy;
  const bool tells = options.rest_pages && policy.recall.enabled && !policy.recall.all &&
                     policy.scope == Scope::kLayer;
  return tells ? PagesFor(sequence.max_tokens, options.shape.page_tokens) : 0;
}

}  // namespace heavywater
