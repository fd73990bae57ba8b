// The plan of a sequence with recall: residents compete with the demoted
// positions that KV heads propose.
#pragma once

#include "absl/status/status.h"
#include "worker/rank/plan.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {

// All layers: keeps sinks, recent, and the top of residents and candidates;
// victims' scores go to recall's ledger. Scores are up to date.
absl::Status EvictAndPromote(RankCache& cache, SequenceCache& sequence, const PlanInput& input);

}  // namespace heavywater
