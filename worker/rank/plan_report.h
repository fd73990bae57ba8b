// What a rank tells the registry about a sequence, behind a plan.
#pragma once

#include <cstdint>
#include <vector>

#include "cache_service/base/ids.h"
#include "worker/policy/policy.h"

namespace heavywater {

// Positions [begin, end).
struct PositionRange {
  Position begin = 0;
  Position end = 0;
  bool operator==(const PositionRange&) const = default;
};

// The residents of one layer and one set.
struct ResidentSet {
  int layer = 0;
  int kv_head = -1;                 // over the whole model; -1: shared by all (scope layer)
  std::vector<Position> positions;  // ascending
  std::vector<int64_t> scores;      // of each, 2^-32 fixed point
};

struct PlanReport {
  SequenceId sequence = 0;
  Scope scope = Scope::kLayer;
  int64_t plan_number = 0;  // 0: the prompt's end, then one for each plan
  int64_t tokens_seen = 0;
  int64_t tokens_resident = 0;  // of each set, or the mean over layers that differ
  // Sum over residents of a mix of (layer, KV head, position). Scope layer: the
  // same on every rank. Scope kv_head: ranks' sums add up to the group's.
  uint64_t hash = 0;
  int64_t watermark = 0;                // positions below it need no host page of this rank
  std::vector<PositionRange> unbacked;  // positions without a host row: dropped once evicted
  std::vector<ResidentSet> sets;        // by layer, then set; empty unless asked for
};

}  // namespace heavywater
