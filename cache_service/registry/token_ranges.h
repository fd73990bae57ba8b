// Sets of positions as ranges: ascending, disjoint, not touching.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "google/protobuf/repeated_field.h"

namespace heavywater {

// [begin, end), never empty.
struct TokenRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const TokenRange&) const = default;
};
using TokenRanges = std::vector<TokenRange>;

// [0, end) without `positions` (ascending, each below `end`).
TokenRanges Complement(std::span<const int32_t> positions, int64_t end);
TokenRanges Union(const TokenRanges& a, const TokenRanges& b);
TokenRanges Intersect(const TokenRanges& a, const TokenRanges& b);
TokenRanges Subtract(const TokenRanges& a, const TokenRanges& b);
int64_t CountTokens(const TokenRanges& ranges);

// The wire form: first0, last0, first1, last1, ... with `last` exclusive.
using FlatRanges = google::protobuf::RepeatedField<int64_t>;
// INVALID_ARGUMENT unless they are ascending within [0, end].
absl::Status CheckFlatRanges(const char* field, const FlatRanges& flat, int64_t end);
TokenRanges FromFlat(const FlatRanges& flat);
void AppendFlat(const TokenRanges& ranges, FlatRanges* flat);

}  // namespace heavywater
