#include "worker/sizing/memory_plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <span>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/model/cuda/runner_bytes.h"
#include "worker/model/rank_shard.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/recall_memory.h"
#include "worker/rank/workspace.h"

namespace heavywater {
namespace {

constexpr WeightType kWeightType = WeightType::kBFloat16;
constexpr int64_t kMaxContext = std::numeric_limits<Position>::max();

absl::Status CheckRange(const char* field, int64_t got, int64_t low, int64_t high) {
  if (got >= low && got <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", got, ", want ", low, " to ", high));
}

// Keeps every product below within 63 bits.
constexpr int64_t kMaxTokenBytes = int64_t{1} << 30;

absl::Status Check(const Deployment& deployment) {
  HW_RETURN_IF_ERROR(CheckRange("new_tokens", deployment.new_tokens, 0, kMaxContext - 1));
  HW_RETURN_IF_ERROR(CheckRange("context_tokens", deployment.context_tokens,
                                deployment.new_tokens + 1, kMaxContext));
  HW_RETURN_IF_ERROR(CheckRange("num_sequences", deployment.num_sequences, 1, 1 << 12));
  HW_RETURN_IF_ERROR(CheckRange("page_tokens", deployment.page_tokens, 1, 1 << 16));
  HW_RETURN_IF_ERROR(CheckRange("max_step_tokens", deployment.max_step_tokens, 1, 1 << 20));
  const ModelConfig& model = deployment.model;
  return CheckRange("the KV of one token of all sequences, in bytes,",
                    int64_t{2} * model.num_layers * model.num_kv_heads * model.head_dim *
                        ElementBytes(deployment.kv_dtype) * deployment.num_sequences,
                    1, kMaxTokenBytes);
}

// Rank 0: where parts are uneven it has the largest.
RankCacheOptions RankOptions(const Deployment& deployment, const RankShard& shard) {
  RankCacheOptions options;
  options.shape =
      MakeKvShape(deployment.model, shard,
                  {.dtype = deployment.kv_dtype, .page_tokens = deployment.page_tokens});
  options.world_size = deployment.world_size;
  options.hidden_size = deployment.model.hidden_size;
  options.vocab_size = deployment.model.vocab_size;
  options.max_step_tokens = deployment.max_step_tokens;
  return options;
}

// Mean over blocks.
int64_t ResidentTokens(const Budget& budget, const SequenceOptions& sequence,
                       std::span<const int64_t> capacities) {
  if (budget.bounded_decode) {
    return std::accumulate(capacities.begin(), capacities.end(), int64_t{0}) /
           static_cast<int64_t>(capacities.size());
  }
  const int64_t new_tokens = sequence.max_tokens - sequence.prompt_tokens;
  return PromptKept(budget.OfLayer(0), sequence.prompt_tokens) + new_tokens;
}

// Of one sequence. Gains are read and written in every step; gains and scores once
// more at a plan.
StepReads ReadsOf(const RankCacheOptions& options, const SequenceOptions& sequence,
                  const Budget& budget, const RecallBytes& recall, int64_t resident) {
  const KvShape& shape = options.shape;
  const int sets = SetLayoutOf(options, sequence.policy.scope).own_sets;
  const LayerBytes layer = DeviceLayerBytes(shape, sets, resident);
  StepReads reads;
  reads.kv = shape.num_layers * layer.slots;
  reads.scores = shape.num_layers * layer.tables;
  if (budget.uses_scores) {
    const int64_t gains = resident * shape.num_kv_heads * int64_t{sizeof(int64_t)};
    reads.scores +=
        shape.num_layers * 2 * (gains + layer.scores / sequence.policy.plan_interval_steps);
  }
  if (!sequence.policy.recall.enabled) return reads;
  reads.sketches = recall.sketches + recall.tables + recall.channels;
  const int64_t demoted = sequence.max_tokens - resident;
  const int64_t picks = sequence.policy.recall.all
                            ? demoted
                            : std::min<int64_t>(demoted, sequence.policy.recall.recall_tokens);
  reads.host = int64_t{shape.num_layers} * shape.num_kv_heads * picks * shape.row_bytes();
  return reads;
}

// Of an embedding table a step reads a row a token; tied, it is the logits' matrix, too.
int64_t UnreadWeights(const ModelConfig& model, const RankShard& shard) {
  if (model.tied_embeddings) return 0;
  return shard.vocab.size * model.hidden_size * BytesOf(kWeightType);
}

StepReads Times(const StepReads& reads, int64_t count) {
  return {.weights = reads.weights,
          .kv = reads.kv * count,
          .scores = reads.scores * count,
          .sketches = reads.sketches * count,
          .host = reads.host * count};
}

}  // namespace

absl::StatusOr<MemoryPlan> PlanMemory(const Deployment& deployment,
                                      const ScratchSizes& scratch_sizes) {
  HW_RETURN_IF_ERROR(Check(deployment));
  HW_ASSIGN_OR_RETURN(const RankShard shard,
                      MakeRankShard(deployment.model, 0, deployment.world_size));
  const RankCacheOptions options = RankOptions(deployment, shard);
  HW_RETURN_IF_ERROR(options.shape.Validate());
  const SequenceOptions sequence = {
      .policy = deployment.policy,
      .prompt_tokens = deployment.context_tokens - deployment.new_tokens,
      .max_tokens = deployment.context_tokens};
  HW_RETURN_IF_ERROR(CheckRecall(options, sequence, /*has_host_tier=*/true));
  HW_ASSIGN_OR_RETURN(const Budget budget, ResolveSequenceBudget(options.shape, sequence));
  HW_RETURN_IF_ERROR(CheckHeadBudgets(options, sequence.policy));
  const BlockSizes sizes = LargestSizes(options, budget, sequence);
  const std::vector<int64_t>& capacities = sizes.capacities;
  const int64_t capacity = *std::max_element(capacities.begin(), capacities.end());
  const RecallBytes recall = RecallBytesOf(options, budget, sequence, capacity);

  MemoryPlan plan;
  plan.budget = budget;
  plan.device = {.weights = CudaRunnerWeightBytes(deployment.model, shard, kWeightType),
                 .runner = CudaRunnerWorkspaceBytes(deployment.model, shard,
                                                    deployment.max_step_tokens, kWeightType),
                 .workspace = Workspace::StandingBytes(options),
                 .sequence = BytesOf(options, scratch_sizes, budget, sequence, sizes),
                 .prompt_hidden = PromptHiddenBytes(sequence.prompt_tokens, options.hidden_size),
                 .num_sequences = deployment.num_sequences};
  plan.resident_tokens = ResidentTokens(budget, sequence, capacities);
  plan.kv_bytes = plan.device.sequence.layers + recall.total();
  plan.full_kv_bytes = FullCacheBytes(options.shape, deployment.context_tokens);
  plan.host_bytes = deployment.num_sequences * plan.full_kv_bytes;  // write-through: every page
  plan.step = Times(ReadsOf(options, sequence, budget, recall, plan.resident_tokens),
                    deployment.num_sequences);
  plan.step.weights = plan.device.weights - UnreadWeights(deployment.model, shard);
  return plan;
}

absl::StatusOr<int64_t> LongestContext(const Deployment& deployment,
                                       const ScratchSizes& scratch_sizes, int64_t device_bytes) {
  Deployment tried = deployment;
  int64_t fitting = deployment.new_tokens;
  int64_t too_long = kMaxContext + 1;
  while (too_long - fitting > 1) {
    tried.context_tokens = fitting + (too_long - fitting) / 2;
    HW_ASSIGN_OR_RETURN(const MemoryPlan plan, PlanMemory(tried, scratch_sizes));
    (plan.device.total() <= device_bytes ? fitting : too_long) = tried.context_tokens;
  }
  return fitting == deployment.new_tokens ? 0 : fitting;
}

}  // namespace heavywater
