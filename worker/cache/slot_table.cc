#include "worker/cache/slot_table.h"

#include <algorithm>
#include <functional>
#include <numeric>

#include "cache_service/base/check.h"

namespace heavywater {

int64_t SlotTable::UsedAfter(int64_t num_tokens) const {
  return used_ + std::max<int64_t>(num_tokens - static_cast<int64_t>(free_.size()), 0);
}

void SlotTable::Append(Position first_position, int64_t num_tokens, std::vector<int32_t>& slots) {
  std::vector<Position> positions(num_tokens);
  std::iota(positions.begin(), positions.end(), first_position);
  Place(positions, slots);
}

void SlotTable::Place(std::span<const Position> positions, std::vector<int32_t>& slots) {
  HW_CHECK(Fits(static_cast<int64_t>(positions.size())));
  for (const Position position : positions) {
    int32_t slot;
    if (free_.empty()) {
      slot = static_cast<int32_t>(used_++);
    } else {
      slot = free_.back();
      free_.pop_back();
    }
    positions_[slot] = position;
    slots.push_back(slot);
  }
}

void SlotTable::Assign(std::span<const Position> positions) {
  HW_CHECK(used_ == 0 && static_cast<int64_t>(positions.size()) <= capacity());
  std::copy(positions.begin(), positions.end(), positions_.begin());
  used_ = static_cast<int64_t>(positions.size());
}

void SlotTable::Restore(std::span<const Position> positions) {
  Assign(positions);
  for (int32_t slot = static_cast<int32_t>(used_) - 1; slot >= 0; --slot) {
    if (positions_[slot] == kNoPosition) free_.push_back(slot);
  }
}

void SlotTable::Release(std::span<const int32_t> slots) {
  for (int32_t slot : slots) {
    HW_CHECK(slot >= 0 && slot < used_ && positions_[slot] != kNoPosition);
    positions_[slot] = kNoPosition;
    free_.push_back(slot);
  }
  std::sort(free_.begin(), free_.end(), std::greater<>());
}

void SlotTable::Undo(std::span<const int32_t> slots, int64_t used_before) {
  Release(slots);
  HW_CHECK(used_before <= used_);
  std::erase_if(free_, [used_before](int32_t slot) { return slot >= used_before; });
  used_ = used_before;
}

std::vector<int32_t> SlotTable::SlotsByPosition() const {
  std::vector<int32_t> slots;
  slots.reserve(resident());
  for (int32_t slot = 0; slot < used_; ++slot) {
    if (positions_[slot] != kNoPosition) slots.push_back(slot);
  }
  std::sort(slots.begin(), slots.end(),
            [this](int32_t a, int32_t b) { return positions_[a] < positions_[b]; });
  return slots;
}

void SlotTable::Grow(int64_t capacity) {
  HW_CHECK(capacity >= this->capacity());
  positions_.resize(capacity, kNoPosition);
}

std::vector<SlotTable::Move> SlotTable::Shrink(int64_t capacity) {
  HW_CHECK(resident() <= capacity && capacity <= this->capacity());
  std::vector<Move> moves;
  // The lowest free slot is last; those at or above `capacity` just go.
  std::erase_if(free_, [capacity](int32_t slot) { return slot >= capacity; });
  for (int32_t slot = static_cast<int32_t>(capacity); slot < used_; ++slot) {
    if (positions_[slot] == kNoPosition) continue;
    HW_CHECK(!free_.empty());
    moves.push_back({.from = slot, .to = free_.back()});
    positions_[free_.back()] = positions_[slot];
    free_.pop_back();
  }
  used_ = std::min(used_, capacity);
  positions_.resize(capacity);
  return moves;
}

}  // namespace heavywater
