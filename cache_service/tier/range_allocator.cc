#include "cache_service/tier/range_allocator.h"

#include <iterator>

#include "cache_service/base/check.h"

namespace heavywater {

RangeAllocator::RangeAllocator(int64_t total_units)
    : total_units_(total_units), free_units_(total_units) {
  if (total_units > 0) free_runs_[0] = total_units;
}

std::optional<int64_t> RangeAllocator::Allocate(int64_t units) {
  HW_CHECK(units > 0);
  for (auto run = free_runs_.begin(); run != free_runs_.end(); ++run) {
    if (run->second < units) continue;
    const int64_t first = run->first;
    const int64_t left = run->second - units;
    free_runs_.erase(run);
    if (left > 0) free_runs_[first + units] = left;
    free_units_ -= units;
    return first;
  }
  return std::nullopt;
}

bool RangeAllocator::Take(int64_t first_unit, int64_t units) {
  if (first_unit < 0 || units <= 0 || units > total_units_) return false;
  auto run = free_runs_.upper_bound(first_unit);
  if (run == free_runs_.begin()) return false;
  --run;
  const int64_t run_first = run->first;
  const int64_t before = first_unit - run_first;
  const int64_t after = run->second - before - units;
  if (after < 0) return false;
  free_runs_.erase(run);
  if (before > 0) free_runs_[run_first] = before;
  if (after > 0) free_runs_[first_unit + units] = after;
  free_units_ -= units;
  return true;
}

void RangeAllocator::Free(int64_t first_unit, int64_t units) {
  HW_CHECK(first_unit >= 0 && units > 0 && first_unit + units <= total_units_);
  int64_t first = first_unit;
  int64_t length = units;
  auto next = free_runs_.lower_bound(first_unit);
  HW_CHECK(next == free_runs_.end() || first_unit + units <= next->first);
  if (next != free_runs_.begin()) {
    const auto previous = std::prev(next);
    const int64_t previous_end = previous->first + previous->second;
    HW_CHECK(previous_end <= first_unit);
    if (previous_end == first_unit) {
      first = previous->first;
      length += previous->second;
      free_runs_.erase(previous);
    }
  }
  if (next != free_runs_.end() && next->first == first_unit + units) {
    length += next->second;
    free_runs_.erase(next);
  }
  free_runs_[first] = length;
  free_units_ += units;
}

}  // namespace heavywater
