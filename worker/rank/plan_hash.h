// Hashes of which positions a sequence keeps, to compare ranks and reports.
#pragma once

#include <cstdint>

#include "cache_service/base/ids.h"

namespace heavywater {

// A term of the sums below: a bijective mix of its arguments' combination
// (splitmix64). Sums do not depend on order.
uint64_t HashTerm(uint64_t layer, uint64_t head, uint64_t slot, uint64_t position);

// Sums over residents of one or more layers.
struct PlanHash {
  uint64_t positions = 0;  // of (layer, head, position): what reports carry
  uint64_t placement = 0;  // of (layer, head, slot, position): what ranks compare
  bool operator==(const PlanHash&) const = default;
};

// Adds or takes away one resident. `head`: KV head over the model plus one, or 0
// when all heads share the set.
void AddResident(int layer, int head, int slot, Position position, PlanHash& hash);
void RemoveResident(int layer, int head, int slot, Position position, PlanHash& hash);

}  // namespace heavywater
