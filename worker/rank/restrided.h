// Tables of several rows in one vector that grow.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace heavywater {

// `rows` rows of `from_stride` as rows of `to_stride`, no less; what is new is T().
template <typename T>
std::vector<T> Restrided(const std::vector<T>& from, int rows, int64_t from_stride,
                         int64_t to_stride) {
  std::vector<T> to(rows * to_stride);
  for (int row = 0; row < rows; ++row) {
    std::copy_n(from.begin() + row * from_stride, from_stride, to.begin() + row * to_stride);
  }
  return to;
}

}  // namespace heavywater
