// The state of a sequence on one rank between two steps, but for the bytes of K and
// V, which its host pages hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cache_service/base/ids.h"
#include "worker/rank/demoted_ledger.h"

namespace heavywater {

// One layer's set. Slots matter: sums over them are rounded in their order.
struct SlotSnapshot {
  std::vector<Position> positions;  // by slot, kNoPosition where free
  std::vector<int64_t> scores;      // likewise, 2^-32; empty: all 0
};

struct RecallSnapshot {
  int64_t sketched_tokens = 0;  // 0: no sketches yet
  int64_t clock = 0;
  std::vector<std::byte> channels;      // as on the device
  std::vector<std::byte> squares;       // likewise; empty once sketched
  std::vector<LedgerSnapshot> ledgers;  // [num_layers]
  int64_t steps = 0;
  int64_t queries = 0;
  int64_t reads = 0;
  int64_t reads_max = 0;
  int64_t promoted = 0;
};

struct SequenceSnapshot {
  int64_t tokens_seen = 0;
  int64_t plans = 0;
  int64_t queries_since_plan = 0;
  std::vector<SlotSnapshot> slots;  // [num_layers][own sets]
  std::optional<RecallSnapshot> recall;
};

}  // namespace heavywater
