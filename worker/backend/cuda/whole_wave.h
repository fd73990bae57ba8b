// When a wave's tokens are not split over blocks (attend_whole.cu). Plain C++.
#pragma once

#include <cstdint>
#include <span>

#include "worker/backend/cuda/attend_wave.h"

namespace heavywater::cuda {

// Of one multiprocessor: one waits while the other works.
inline constexpr int kWholeBlocks = 2;

struct DeviceLimits {
  int multiprocessors = 0;
  int64_t shared_bytes = 0;        // of a multiprocessor
  int64_t block_shared_bytes = 0;  // that a block may ask for
};

// Shared memory of a block that keeps the weights of `used` slots; 0: more query heads
// for each KV head, or more slots, than it does.
int64_t WholeSharedBytes(int group_size, int head_dim, int64_t used);

// WholeSharedBytes() of the wave's longest token, or 0 where it is better split: when
// kWholeBlocks do not fit a multiprocessor, or a quarter of the device would idle.
// Results are the same bits either way. Tokens with recall are always split: their
// picks come between the slots' totals and the gains.
int64_t WholeWaveSharedBytes(const WaveShape& shape, std::span<const WaveToken> wave,
                             const DeviceLimits& device);

}  // namespace heavywater::cuda
