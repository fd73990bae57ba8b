// Sizes of an AttendBlock that are the same for all element types. Plain C++.
#pragma once

#include "worker/backend/cuda/attend_wave.h"

namespace heavywater::cuda {

inline constexpr int kSplitThreads = 256;
inline constexpr int kSplitWarps = kSplitThreads / 32;
inline constexpr int kMaxHeadDim = 256;

// Head sizes run as the next of these.
constexpr int PaddedDim(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

// Query heads that share each load of K and V: 1, 2, 4, 8 or 16. Of a larger group, and at
// head sizes above 128 of one of more than 8, K and V are read again for as many.
constexpr int HeadsAtOnce(int head_dim, int group_size) {
  const int most = head_dim <= 128 ? 16 : 8;
  int heads = 1;
  while (heads < group_size && heads < most) heads *= 2;
  return heads;
}

// Of a block that holds a WaveToken in shared memory, 16-byte aligned.
inline constexpr int kTokenSharedBytes = (sizeof(WaveToken) + 15) / 16 * 16;

}  // namespace heavywater::cuda
