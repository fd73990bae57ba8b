// SelectKept() (worker/policy/selection.h) in linear time over a set's slots.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/policy/selection.h"

namespace heavywater {

class SlotSelector {
 public:
  // kept[i] = 1 where candidate i stays, 0 where it goes or is free. The same
  // choice as SelectKept(), bit for bit.
  void Select(const Candidates& candidates, const SelectionParams& params, std::span<uint8_t> kept);

 private:
  struct Candidate {
    int64_t score;
    Position position;
    int32_t index;
  };

  std::vector<Candidate> candidates_;  // reused between calls
};

}  // namespace heavywater
