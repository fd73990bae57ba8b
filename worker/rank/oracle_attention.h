// Policy `oracle`: attention over the positions that the step itself pays most.
#pragma once

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/sequence_cache.h"
#include "worker/rank/sequence_options.h"

namespace heavywater {

// INVALID_ARGUMENT where ranks share KV heads: each would choose by its own query heads.
absl::Status CheckOracle(const RankCacheOptions& options, const SequenceOptions& sequence);

// Device bytes that it works in, for sets of up to `capacity` slots; 0 with other policies.
int64_t OracleBytes(const KvShape& shape, const Budget& budget, int64_t capacity);

// Attend() of one sequence, token by token: each KV head attends to all residents, and
// then anew to sinks, recent, and the budget's rest of those that its query heads
// together paid most, ties to the lower position (SelectKept). For evaluation: every
// token waits for the device. `params` without its items.
absl::Status AttendToTheTop(RankCache& cache, const SequenceCache& sequence, int layer,
                            const AttendItem& item, AttendParams params);

}  // namespace heavywater
