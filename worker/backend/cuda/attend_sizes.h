// Sizes of an AttendBlock that are the same for all element types. Plain C++.
#pragma once

#include "worker/backend/cuda/attend_wave.h"

namespace heavywater::cuda {

inline constexpr int kSplitThreads = 256;
inline constexpr int kSplitWarps = kSplitThreads / 32;
// Query heads that share each load of K and V; of larger groups K and V are read again
// for as many.
inline constexpr int kMostHeadsAtOnce = 8;

// Head sizes up to 256 run as the next of these.
constexpr int PaddedDim(int head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }

// Of a block that holds a WaveToken in shared memory, 16-byte aligned.
inline constexpr int kTokenSharedBytes = (sizeof(WaveToken) + 15) / 16 * 16;

}  // namespace heavywater::cuda
