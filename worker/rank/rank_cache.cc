#include "worker/rank/rank_cache.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/rank/agreement.h"
#include "worker/rank/cache_places.h"
#include "worker/rank/oracle_attention.h"
#include "worker/rank/recall_memory.h"
#include "worker/rank/sequence_cache.h"
#include "worker/rank/sequence_memory.h"
#include "worker/rank/workspace.h"

namespace heavywater {
namespace {

absl::Status CheckAtLeast(const char* field, int64_t got, int64_t low) {
  if (got >= low) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", got, ", want at least ", low));
}

absl::Status CheckIndex(const char* field, int64_t got, int64_t count) {
  if (got >= 0 && got < count) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", got, ", want 0 to ", count - 1));
}

// One of ranks and KV heads divides the other: each rank has a share of the
// heads, or each head a share of the ranks.
absl::Status CheckShare(const RankCacheOptions& options) {
  const KvShape& shape = options.shape;
  const int total = shape.total_kv_heads;
  const int world = options.world_size;
  if (total % world != 0 && world % total != 0) {
    return absl::InvalidArgumentError(absl::StrCat("world_size is ", world,
                                                   ", want a divisor or multiple of the model's ",
                                                   total, " KV heads"));
  }
  const int want = std::max(total / world, 1);
  if (shape.num_kv_heads != want) {
    return absl::InvalidArgumentError(absl::StrCat("num_kv_heads is ", shape.num_kv_heads,
                                                   ", want ", want, " of ", total, " for ", world,
                                                   " ranks"));
  }
  const int64_t want_first = int64_t{options.rank} * total / world;
  if (shape.first_kv_head == want_first) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "first_kv_head is ", shape.first_kv_head, ", want ", want_first, " for rank ", options.rank));
}

absl::Status Check(const RankCacheOptions& options, const Backend& backend) {
  if (options.rest_pages && !backend.CanRest()) {
    return absl::InvalidArgumentError(
        absl::StrCat("rest_pages is on, but recall on ", backend.Name(), " reads every page"));
  }
  HW_RETURN_IF_ERROR(options.shape.Validate());
  HW_RETURN_IF_ERROR(CheckAtLeast("world_size", options.world_size, 1));
  HW_RETURN_IF_ERROR(CheckAtLeast("rank", options.rank, 0));
  HW_RETURN_IF_ERROR(CheckAtLeast("hidden_size", options.hidden_size, 0));
  HW_RETURN_IF_ERROR(CheckAtLeast("vocab_size", options.vocab_size, 0));
  HW_RETURN_IF_ERROR(CheckAtLeast("device_memory_bytes", options.device_memory_bytes, 0));
  HW_RETURN_IF_ERROR(CheckAtLeast("max_step_tokens", options.max_step_tokens, 1));
  HW_RETURN_IF_ERROR(CheckAtLeast("reserve_ahead_tokens", options.reserve_ahead_tokens, 0));
  HW_RETURN_IF_ERROR(CheckAtLeast("trained_tokens", options.trained_tokens, 0));
  const auto half = static_cast<size_t>(options.shape.head_dim / 2);
  if (!options.rope_frequencies.empty() && options.rope_frequencies.size() != half) {
    return absl::InvalidArgumentError(absl::StrCat(
        "rope_frequencies has ", options.rope_frequencies.size(), " values, want none or ", half));
  }
  if (options.rank >= options.world_size) {
    return absl::InvalidArgumentError(absl::StrCat("rank is ", options.rank, ", want below ",
                                                   options.world_size, " (world_size)"));
  }
  return CheckShare(options);
}

absl::Status CheckTokens(const SequenceOptions& options) {
  HW_RETURN_IF_ERROR(CheckAtLeast("prompt_tokens", options.prompt_tokens, 1));
  return CheckAtLeast("max_tokens", options.max_tokens, options.prompt_tokens);
}

}  // namespace

RankCache::RankCache(const RankCacheOptions& options, Backend& backend, HostTier* tier)
    : options_(options),
      backend_(backend),
      tier_(tier),
      memory_(backend, options.device_memory_bytes) {}

RankCache::~RankCache() = default;

absl::StatusOr<std::unique_ptr<RankCache>> RankCache::Create(const RankCacheOptions& options,
                                                             Backend& backend, HostTier* tier) {
  HW_RETURN_IF_ERROR(Check(options, backend));
  HW_RETURN_IF_ERROR(backend.CheckShape(options.shape));
  std::unique_ptr<RankCache> cache(new RankCache(options, backend, tier));
  HW_ASSIGN_OR_RETURN(cache->stream_, backend.NewStream());
  HW_ASSIGN_OR_RETURN(cache->workspace_, Workspace::Create(options, cache->memory_));
  return cache;
}

absl::Status RankCache::Open(SequenceId sequence, const SequenceOptions& options) {
  if (sequences_.contains(sequence)) {
    return absl::AlreadyExistsError(absl::StrCat("sequence ", sequence, " is open"));
  }
  HW_RETURN_IF_ERROR(CheckRecall(options_, options, tier_ != nullptr));
  HW_ASSIGN_OR_RETURN(const int64_t needed, DeviceBytesNeeded(options));
  if (needed > memory_.free_bytes()) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "sequence ", sequence, " needs ", needed, " bytes of device memory, limit ",
        memory_.limit_bytes(), ", in use ", memory_.reserved_bytes(), "; of ",
        options.prompt_tokens, " prompt tokens wanted, the longest prompt that fits has ",
        LongestPromptThatFits(options)));
  }
  HW_ASSIGN_OR_RETURN(sequences_[sequence],
                      SequenceCache::Create(options_, sequence, options, memory_, stream_, tier_));
  return absl::OkStatus();
}

absl::Status RankCache::Restore(SequenceId sequence, SequenceOptions options,
                                const SequenceSnapshot& snapshot, int64_t known_tokens) {
  options.restored_tokens = snapshot.tokens_seen;
  HW_RETURN_IF_ERROR(Open(sequence, options));
  const absl::Status restored = sequences_[sequence]->Restore(snapshot, known_tokens);
  if (!restored.ok()) HW_RETURN_IF_ERROR(Close(sequence));
  return restored;
}

absl::Status RankCache::Close(SequenceId sequence) {
  HW_RETURN_IF_ERROR(Find(sequence).status());
  sequences_.erase(sequence);
  workspace_->Trim();
  return absl::OkStatus();
}

absl::StatusOr<SequenceCache*> RankCache::Find(SequenceId sequence) const {
  const auto found = sequences_.find(sequence);
  if (found == sequences_.end()) {
    return absl::NotFoundError(absl::StrCat("sequence ", sequence, " is not open"));
  }
  return found->second.get();
}

absl::StatusOr<int64_t> RankCache::DeviceBytesNeeded(const SequenceOptions& options) const {
  HW_RETURN_IF_ERROR(CheckTokens(options));
  HW_ASSIGN_OR_RETURN(const Budget budget, ResolveSequenceBudget(options_.shape, options));
  HW_RETURN_IF_ERROR(CheckPlaces(options_, options, budget));
  HW_RETURN_IF_ERROR(CheckOracle(options_, options));
  HW_RETURN_IF_ERROR(CheckHeadBudgets(options_, options.policy));
  return BytesOf(options_, backend_, budget, options, LargestSizes(options_, budget, options))
      .total();
}

int64_t RankCache::LongestPromptThatFits(const SequenceOptions& options) const {
  const int64_t after_prompt = options.max_tokens - options.prompt_tokens;
  const auto fits = [&](int64_t prompt_tokens) {
    SequenceOptions shorter = options;
    shorter.prompt_tokens = prompt_tokens;
    shorter.max_tokens = prompt_tokens + after_prompt;
    const absl::StatusOr<int64_t> needed = DeviceBytesNeeded(shorter);
    return needed.ok() && *needed <= memory_.free_bytes();
  };
  // Needs never fall as the prompt grows.
  int64_t fitting = 0;
  int64_t too_long = options.prompt_tokens + 1;
  while (too_long - fitting > 1) {
    const int64_t middle = fitting + (too_long - fitting) / 2;
    (fits(middle) ? fitting : too_long) = middle;
  }
  return fitting;
}

bool RankCache::PlanDue(SequenceId sequence, int64_t num_tokens) const {
  const absl::StatusOr<SequenceCache*> cache = Find(sequence);
  return cache.ok() && (*cache)->PlanDue(num_tokens);
}

absl::StatusOr<SequenceStats> RankCache::Stats(SequenceId sequence) const {
  HW_ASSIGN_OR_RETURN(const SequenceCache* cache, Find(sequence));
  return cache->Stats();
}

absl::StatusOr<PlanReport> RankCache::Report(SequenceId sequence, bool with_sets) {
  HW_ASSIGN_OR_RETURN(const SequenceCache* cache, Find(sequence));
  return cache->Report(with_sets);
}

absl::StatusOr<std::vector<std::byte>> RankCache::ReadResident(SequenceId sequence, int layer,
                                                               int kv_head, Position position) {
  HW_ASSIGN_OR_RETURN(const SequenceCache* cache, Find(sequence));
  return cache->ReadResident(layer, kv_head, position);
}

absl::StatusOr<std::vector<std::byte>> RankCache::ReadKv(SequenceId sequence, int layer,
                                                         int kv_head, Position position) {
  HW_ASSIGN_OR_RETURN(const SequenceCache* cache, Find(sequence));
  HW_RETURN_IF_ERROR(CheckIndex("layer", layer, options_.shape.num_layers));
  HW_RETURN_IF_ERROR(CheckIndex("kv_head", kv_head, options_.shape.num_kv_heads));
  if (!cache->prompt_done()) {
    return absl::FailedPreconditionError("the prompt has not run to its end");
  }
  if (position < 0 || position >= cache->tokens_seen()) {
    return absl::OutOfRangeError(absl::StrCat("position is ", position, ", want 0 to ",
                                              cache->tokens_seen() - 1, ", the last one seen"));
  }
  return cache->ReadKv(layer, kv_head, position);
}

std::vector<SequenceId> RankCache::sequence_ids() const {
  std::vector<SequenceId> ids;
  for (const auto& [id, cache] : sequences_) ids.push_back(id);
  return ids;
}

float RankCache::attention_scale() const {
  if (options_.attention_scale != 0) return options_.attention_scale;
  return static_cast<float>(1.0 / std::sqrt(static_cast<double>(options_.shape.head_dim)));
}

}  // namespace heavywater
