// Whom a plan gives up, and who comes back.
#pragma once

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/rank/plan.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {

// Every set of every layer keeps sinks, recent, and the top of the rest: of its
// residents, and with recall of the demoted positions that KV heads propose, too.
// Chosen on the device, where the scores are; only the victims (with recall: their
// scores, for its ledger) come to the host, once for all layers. Scores are up to
// date.
// Waits for host pages that rest (RecallOptions::wait) at most `wait_left`, and takes that from it.
absl::Status Evict(RankCache& cache, SequenceCache& sequence, const PlanInput& input,
                   absl::Duration& wait_left);

}  // namespace heavywater
