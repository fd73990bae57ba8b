#include "worker/server/position_reads.h"

#include <algorithm>
#include <vector>

namespace heavywater {

void FillReads(std::span<const int64_t> reads,
               google::protobuf::RepeatedPtrField<v1::PositionReads>& to) {
  std::vector<int32_t> positions;
  for (size_t position = 0; position < reads.size(); ++position) {
    if (reads[position] > 0) positions.push_back(static_cast<int32_t>(position));
  }
  const size_t count = std::min(positions.size(), kMaxPositionReads);
  std::partial_sort(positions.begin(), positions.begin() + static_cast<std::ptrdiff_t>(count),
                    positions.end(), [&](int32_t left, int32_t right) {
                      if (reads[left] != reads[right]) return reads[left] > reads[right];
                      return left < right;
                    });
  for (size_t i = 0; i < count; ++i) {
    v1::PositionReads& one = *to.Add();
    one.set_position(positions[i]);
    one.set_count(reads[positions[i]]);
  }
}

}  // namespace heavywater
