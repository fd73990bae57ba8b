// Rotary position embedding: the angles of a batch of positions.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache_service/base/ids.h"

namespace heavywater {

// Pair i of a head at position p turns by p * base^(-2i / head_dim) / factors[i]
// (RoFormer, arXiv:2104.09864; factors of rope_scaling.h, none = 1) and grows by
// `magnitude`. Computed in double and kept for the positions last asked for: all layers of a step
// ask for the same ones.
class RopeAngles {
 public:
  // `factors` is empty or [head_dim / 2].
  RopeAngles(int head_dim, double base, std::span<const float> factors, double magnitude = 1);

  // Makes row i the angles of positions[i].
  void SetPositions(std::span<const Position> positions);

  const float* cosines(int64_t row) const { return cosines_.data() + row * half(); }  // [half]
  const float* sines(int64_t row) const { return sines_.data() + row * half(); }      // [half]
  const std::vector<double>& frequencies() const { return frequencies_; }
  int64_t half() const { return static_cast<int64_t>(frequencies_.size()); }

 private:
  std::vector<double> frequencies_;  // [head_dim / 2], radians a position
  double magnitude_;
  std::vector<Position> positions_;
  std::vector<float> cosines_;  // [num_positions][half]
  std::vector<float> sines_;    // [num_positions][half]
};

}  // namespace heavywater
