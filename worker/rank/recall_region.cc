#include "worker/rank/recall_region.h"

#include "cache_service/base/check.h"

namespace heavywater {

void RecallRegion::Write(int layer, int head, std::span<const PositionGain> gains,
                         std::span<int64_t> buffer) const {
  HW_CHECK(static_cast<int64_t>(gains.size()) <= num_candidates);
  std::span<int64_t> segment = buffer.subspan(Proposals(layer, head), 2 * num_candidates);
  for (const PositionGain& gain : gains) {
    segment[0] = int64_t{gain.position} + 1;
    segment[1] = gain.gain;
    segment = segment.subspan(2);
  }
}

std::vector<PositionGain> RecallRegion::Read(int layer, int head,
                                             std::span<const int64_t> buffer) const {
  std::vector<PositionGain> gains;
  const std::span<const int64_t> segment =
      buffer.subspan(Proposals(layer, head), 2 * num_candidates);
  for (int64_t i = 0; i < num_candidates && segment[2 * i] > 0; ++i) {
    gains.push_back({static_cast<Position>(segment[2 * i] - 1), segment[2 * i + 1]});
  }
  return gains;
}

}  // namespace heavywater
