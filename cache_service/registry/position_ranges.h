// Sets of positions as ranges: ascending, disjoint, not touching.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "google/protobuf/repeated_field.h"

namespace heavywater {

// [begin, end), never empty.
struct PositionRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const PositionRange&) const = default;
};
using PositionRanges = std::vector<PositionRange>;

// [0, end) without `positions` (ascending, each below `end`).
PositionRanges Complement(std::span<const int32_t> positions, int64_t end);
PositionRanges Union(const PositionRanges& a, const PositionRanges& b);
PositionRanges Intersect(const PositionRanges& a, const PositionRanges& b);
PositionRanges Subtract(const PositionRanges& a, const PositionRanges& b);
int64_t CountPositions(const PositionRanges& ranges);

// The wire form: first0, last0, first1, last1, ... with `last` exclusive.
using FlatRanges = google::protobuf::RepeatedField<int64_t>;
// INVALID_ARGUMENT unless they are ascending within [0, end].
absl::Status CheckFlatRanges(const char* field, const FlatRanges& flat, int64_t end);
PositionRanges FromFlat(const FlatRanges& flat);
void AppendFlat(const PositionRanges& ranges, FlatRanges* flat);

}  // namespace heavywater
