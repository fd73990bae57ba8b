#include "worker/rank/plan.h"

#include <vector>

#include "cache_service/base/status.h"
#include "worker/cache/read_device.h"
#include "worker/rank/decay.h"
#include "worker/rank/promotion.h"
#include "worker/rank/sequence_cache.h"
#include "worker/rank/workspace.h"

namespace heavywater {
namespace {

absl::Status AddGains(RankCache& cache, SequenceCache& sequence, const PlanInput& input) {
  const double decay = DecayPower(sequence.options().policy.decay, sequence.queries_since_plan());
  for (int layer = 0; layer < input.gains.num_layers; ++layer) {
    HW_RETURN_IF_ERROR(cache.backend().AddScores(
        sequence.View(layer), input.gains.Own(input.buffer, layer), decay, cache.stream()));
  }
  return absl::OkStatus();
}

// masks: [num_layers][own_sets][used].
absl::Status SelectAll(RankCache& cache, SequenceCache& sequence, DeviceSpan<uint8_t> masks) {
  const Budget& budget = sequence.budget();
  const int64_t per_layer = sequence.sets().own_sets * sequence.used();
  for (int layer = 0; layer < cache.options().shape.num_layers; ++layer) {
    const LayerView view = sequence.View(layer);
    SelectParams params;
    params.positions = view.positions;
    params.scores = view.scores;
    params.kept = masks.Sub(layer * per_layer, per_layer);
    params.num_sets = view.num_sets;
    params.stride = view.capacity;
    params.count = view.used;
    params.selection = {.budget_tokens = budget.budget_tokens,
                        .sink_tokens = budget.sink_tokens,
                        .recent_tokens = budget.recent_tokens,
                        .tokens_seen = sequence.tokens_seen()};
    HW_RETURN_IF_ERROR(cache.backend().Select(params, cache.stream()));
  }
  return absl::OkStatus();
}

absl::Status Evict(RankCache& cache, SequenceCache& sequence) {
  const int64_t used = sequence.used();
  const int sets = sequence.sets().own_sets;
  const int layers = cache.options().shape.num_layers;
  HW_ASSIGN_OR_RETURN(const DeviceSpan<uint8_t> masks,
                      cache.workspace().Masks(layers * sets * used));
  HW_RETURN_IF_ERROR(SelectAll(cache, sequence, masks));
  HW_ASSIGN_OR_RETURN(const std::vector<uint8_t> kept,
                      ReadDevice(masks, cache.backend(), cache.stream()));
  std::span<const uint8_t> rest(kept);
  for (int layer = 0; layer < layers; ++layer) {
    for (int set = 0; set < sets; ++set) {
      HW_RETURN_IF_ERROR(sequence.ReleaseVictims(layer, set, rest.first(used)));
      rest = rest.subspan(used);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunPlan(RankCache& cache, SequenceCache& sequence, const PlanInput& input) {
  const bool evicts = sequence.tokens_resident() > sequence.budget().budget_tokens;
  SequenceRecall* recall = sequence.recall();
  if (recall != nullptr) {
    HW_RETURN_IF_ERROR(
        recall->BeginPlan(sequence.queries_since_plan(), sequence.tokens_seen(), evicts));
  }
  if (sequence.budget().uses_scores) HW_RETURN_IF_ERROR(AddGains(cache, sequence, input));
  if (evicts) {
    HW_RETURN_IF_ERROR(recall != nullptr ? EvictAndPromote(cache, sequence, input)
                                         : Evict(cache, sequence));
  }
  return sequence.FinishPlan();
}

}  // namespace heavywater
