// Which units of a slab are free: runs of units, lowest address first.
#pragma once

#include <cstdint>
#include <map>
#include <optional>

namespace heavywater {

// Not thread safe. The cost is per free run, not per unit: pages of one size
// leave few runs. Lowest address first keeps the used part of the slab dense, so
// that memory beyond its high-water mark is never taken from the system.
class RangeAllocator {
 public:
  explicit RangeAllocator(int64_t total_units);

  // First unit of a run of `units`, or nothing when no free run is long enough.
  std::optional<int64_t> Allocate(int64_t units);

  // Takes these units, if all of them are free.
  bool Take(int64_t first_unit, int64_t units);

  // Exactly a run that Allocate() or Take() gave. Anything else is a bug (CHECK).
  void Free(int64_t first_unit, int64_t units);

  int64_t total_units() const { return total_units_; }
  int64_t free_units() const { return free_units_; }
  int64_t used_units() const { return total_units_ - free_units_; }

 private:
  const int64_t total_units_;
  int64_t free_units_;
  std::map<int64_t, int64_t> free_runs_;  // first unit -> units; never adjacent
};

}  // namespace heavywater
