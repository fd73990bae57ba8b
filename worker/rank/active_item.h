// An item of a step: as it is asked for, and while it runs.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/base/ids.h"
#include "worker/rank/gains_region.h"
#include "worker/rank/recall_region.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {

// New tokens of one sequence. More than one: a multi-token append (a second
// turn); each query sees the residents and the append's earlier tokens, and
// what is too much goes at the plan after it.
struct StepItem {
  SequenceId sequence = 0;
  Position first_position = 0;  // must be the sequence's tokens_seen
  int64_t num_tokens = 1;
  bool plan_due = false;    // RankCache::PlanDue() of rank 0
  bool all_logits = false;  // of every token, not only the last
  bool note_reads = false;  // SequenceRecall::reads() then says what was read in place
};

struct ActiveItem {
  StepItem spec;
  absl::Status status;                // OK: it runs on this rank
  SequenceCache* sequence = nullptr;  // null: not open on this rank, or without a prompt
  int64_t first_row = 0;              // in the step's rows
  std::vector<int64_t> used_before;   // [num_blocks]
  std::vector<int32_t> slots;         // [num_blocks][num_sets][num_tokens], as far as taken
  GainsRegion gains;                  // of size 0 without scores to add
  RecallRegion recall;                // of size 0 without recall
  int64_t row_sums_begin = 0;         // in the exchange's buffer: a sum for each row of gains
  int64_t first_logits_row = 0;

  bool plans() const {
    return spec.plan_due && sequence != nullptr && sequence->budget().bounded_decode;
  }
  bool has_gains() const { return gains.size() > 0; }
  bool reduces_gains() const { return has_gains() && gains.sets.reduced_sets > 0; }
  bool ran() const { return !slots.empty(); }  // on this rank
  int64_t logits_rows() const { return spec.all_logits ? spec.num_tokens : 1; }
};

}  // namespace heavywater
