#include "worker/rank/plan.h"

#include "cache_service/base/status.h"
#include "worker/rank/decay.h"
#include "worker/rank/eviction.h"
#include "worker/rank/pivotal_history.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

absl::Status AddGains(RankCache& cache, SequenceCache& sequence, const PlanInput& input) {
  if (sequence.history() != nullptr) {
    return sequence.history()->AddCounts(cache, sequence, input.gains, input.buffer);
  }
  const double decay = DecayPower(sequence.options().policy.decay, sequence.queries_since_plan());
  for (int block = 0; block < input.gains.num_blocks(); ++block) {
    HW_RETURN_IF_ERROR(cache.backend().AddScores(
        sequence.View(block), input.gains.Own(input.buffer, block), decay, cache.stream()));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunPlan(RankCache& cache, SequenceCache& sequence, const PlanInput& input,
                     absl::Duration& wait_left) {
  const bool evicts = sequence.OverBudget();
  SequenceRecall* recall = sequence.recall();
  if (recall != nullptr) {
    HW_RETURN_IF_ERROR(
        recall->BeginPlan(sequence.queries_since_plan(), sequence.tokens_seen(), evicts));
  }
  if (sequence.budget().uses_scores) HW_RETURN_IF_ERROR(AddGains(cache, sequence, input));
  if (evicts) HW_RETURN_IF_ERROR(Evict(cache, sequence, input, wait_left));
  return sequence.FinishPlan();
}

}  // namespace heavywater
