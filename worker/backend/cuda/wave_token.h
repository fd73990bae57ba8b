// A token's record of the wave in registers or shared memory of a block.
#pragma once

#include "worker/backend/cuda/attend_sizes.h"
#include "worker/backend/cuda/attend_wave.h"
#include "worker/backend/cuda/device_code.h"

namespace heavywater::cuda {

// Copies the token to shared memory, each byte read once by the block. Ends with a
// barrier.
__device__ __forceinline__ void LoadToken(const WaveToken* from, WaveToken& to) {
  constexpr int kWords = sizeof(WaveToken) / sizeof(uint64_t);
  static_assert(sizeof(WaveToken) % sizeof(uint64_t) == 0);
  if (threadIdx.x < kWords) {
    reinterpret_cast<uint64_t*>(&to)[threadIdx.x] =
        Load(reinterpret_cast<const uint64_t*>(from) + threadIdx.x);
  }
  __syncthreads();
}

__host__ __device__ __forceinline__ int NumSplits(int used) {
  return (used + kSplitSlots - 1) / kSplitSlots;
}

}  // namespace heavywater::cuda
