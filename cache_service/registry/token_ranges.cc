#include "cache_service/registry/token_ranges.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

// Keeps the form: touching and overlapping ranges become one. `begin` never goes
// back.
void Append(int64_t begin, int64_t end, TokenRanges& ranges) {
  if (begin >= end) return;
  if (!ranges.empty() && ranges.back().end >= begin) {
    ranges.back().end = std::max(ranges.back().end, end);
    return;
  }
  ranges.push_back({begin, end});
}

}  // namespace

TokenRanges Complement(std::span<const int32_t> positions, int64_t end) {
  TokenRanges ranges;
  int64_t next = 0;
  for (const int64_t position : positions) {
    Append(next, position, ranges);
    next = position + 1;
  }
  Append(next, end, ranges);
  return ranges;
}

TokenRanges Union(const TokenRanges& a, const TokenRanges& b) {
  TokenRanges merged;
  size_t i = 0;
  size_t j = 0;
  while (i < a.size() || j < b.size()) {
    const bool from_a = j == b.size() || (i < a.size() && a[i].begin <= b[j].begin);
    const TokenRange& next = from_a ? a[i++] : b[j++];
    Append(next.begin, next.end, merged);
  }
  return merged;
}

TokenRanges Intersect(const TokenRanges& a, const TokenRanges& b) {
  TokenRanges both;
  size_t i = 0;
  size_t j = 0;
  while (i < a.size() && j < b.size()) {
    Append(std::max(a[i].begin, b[j].begin), std::min(a[i].end, b[j].end), both);
    ++(a[i].end <= b[j].end ? i : j);
  }
  return both;
}

TokenRanges Subtract(const TokenRanges& a, const TokenRanges& b) {
  TokenRanges left;
  size_t j = 0;
  for (const TokenRange& range : a) {
    int64_t next = range.begin;
    while (j < b.size() && b[j].end <= range.begin) ++j;
    for (size_t k = j; k < b.size() && b[k].begin < range.end; ++k) {
      Append(next, b[k].begin, left);
      next = std::max(next, b[k].end);
    }
    Append(next, range.end, left);
  }
  return left;
}

int64_t CountTokens(const TokenRanges& ranges) {
  int64_t count = 0;
  for (const TokenRange& range : ranges) count += range.end - range.begin;
  return count;
}

absl::Status CheckFlatRanges(const char* field, const FlatRanges& flat, int64_t end) {
  if (flat.size() % 2 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(field, " has ", flat.size(), " numbers, want pairs"));
  }
  int64_t last = 0;
  for (int i = 0; i < flat.size(); i += 2) {
    if (flat[i] < last || flat[i + 1] <= flat[i] || flat[i + 1] > end) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, " has [", flat[i], ", ", flat[i + 1], ") after ", last,
                       ", want ascending ranges within [0, ", end, ")"));
    }
    last = flat[i + 1];
  }
  return absl::OkStatus();
}

TokenRanges FromFlat(const FlatRanges& flat) {
  TokenRanges ranges;
  for (int i = 0; i + 1 < flat.size(); i += 2) Append(flat[i], flat[i + 1], ranges);
  return ranges;
}

void AppendFlat(const TokenRanges& ranges, FlatRanges* flat) {
  for (const TokenRange& range : ranges) {
    flat->Add(range.begin);
    flat->Add(range.end);
  }
}

}  // namespace heavywater
