// Which position each slot of one set holds: the host's mirror of the device's
// position table.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache_service/base/ids.h"

namespace heavywater {

// Deterministic: ranks that apply the same calls have the same slots. A
// victim's slot is handed over in place; nothing that stays moves.
class SlotTable {
 public:
  SlotTable() = default;
  explicit SlotTable(int64_t capacity) : positions_(capacity, kNoPosition) {}

  int64_t capacity() const { return static_cast<int64_t>(positions_.size()); }
  int64_t used() const { return used_; }  // slots [0, used) have held positions
  int64_t resident() const { return used_ - static_cast<int64_t>(free_.size()); }
  // The table of slots [0, used), kNoPosition where free.
  std::span<const Position> positions() const { return std::span(positions_).first(used_); }

  // `used` after `num_tokens` more, whether or not they fit.
  int64_t UsedAfter(int64_t num_tokens) const;
  bool Fits(int64_t num_tokens) const { return UsedAfter(num_tokens) <= capacity(); }

  // Slots for positions first_position, +1, ...: the lowest free ones, in order,
  // appended to `slots`. They must fit.
  void Append(Position first_position, int64_t num_tokens, std::vector<int32_t>& slots);
  // The same for any positions.
  void Place(std::span<const Position> positions, std::vector<int32_t>& slots);
  // The prompt's result: position positions[i] in slot i. The table must be empty.
  void Assign(std::span<const Position> positions);
  // As it was when positions() gave these. The table must be empty; they must fit.
  void Restore(std::span<const Position> positions);
  // Frees occupied slots, in any order. `used` stays: sets that gain and lose
  // the same numbers keep the same `used`.
  void Release(std::span<const int32_t> slots);
  // Takes back an Append() that gave `slots` when `used` was `used_before`.
  void Undo(std::span<const int32_t> slots, int64_t used_before);

  // Resident positions' slots in ascending order of position.
  std::vector<int32_t> SlotsByPosition() const;

  void Grow(int64_t capacity);
  // How to fit into `capacity` slots (at least resident()): moves of occupied
  // slots at or above it into the lowest free ones below it, applied here.
  struct Move {
    int32_t from = 0;
    int32_t to = 0;
  };
  std::vector<Move> Shrink(int64_t capacity);

 private:
  std::vector<Position> positions_;
  int64_t used_ = 0;
  std::vector<int32_t> free_;  // free slots below used_, descending
};

}  // namespace heavywater
