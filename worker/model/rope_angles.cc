#include "worker/model/rope_angles.h"

#include <algorithm>
#include <cmath>

#include "cache_service/base/check.h"

namespace heavywater {

RopeAngles::RopeAngles(int head_dim, double base, std::span<const float> factors, double magnitude)
    : magnitude_(magnitude) {
  const int half = head_dim / 2;
  HW_CHECK(factors.empty() || factors.size() == static_cast<size_t>(half));
  for (int i = 0; i < half; ++i) {
    const double factor = factors.empty() ? 1.0 : factors[static_cast<size_t>(i)];
    frequencies_.push_back(std::pow(base, -2.0 * i / head_dim) / factor);
  }
}

void RopeAngles::SetPositions(std::span<const Position> positions) {
  if (std::equal(positions.begin(), positions.end(), positions_.begin(), positions_.end())) return;
  positions_.assign(positions.begin(), positions.end());
  cosines_.clear();
  sines_.clear();
  for (const Position position : positions) {
    for (const double frequency : frequencies_) {
      cosines_.push_back(static_cast<float>(magnitude_ * std::cos(position * frequency)));
      sines_.push_back(static_cast<float>(magnitude_ * std::sin(position * frequency)));
    }
  }
}

}  // namespace heavywater
