// Sums over a block. All threads of the block call these; `partial` is shared memory
// of kWarp elements, free again after the block's next barrier.
#pragma once

#include "worker/backend/cuda/device_code.h"

namespace heavywater::cuda {

// Combines every thread's value; all get the result. Ends with a barrier.
template <typename T, typename Combine>
__device__ __forceinline__ T ReduceBlock(T value, T* partial, const Combine& combine) {
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = combine(value, __shfl_xor_sync(kAllLanes, value, step));
  }
  if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = value;
  __syncthreads();
  T result = partial[0];
  for (unsigned warp = 1; warp < blockDim.x / kWarp; ++warp) {
    result = combine(result, partial[warp]);
  }
  __syncthreads();
  return result;
}

struct Plus {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

// How many threads before this one have `flag` set; `total` of the block. Ends with a
// barrier.
__device__ __forceinline__ int CountBefore(bool flag, int* partial, int& total) {
  const unsigned votes = __ballot_sync(kAllLanes, flag ? 1 : 0);
  const unsigned lane = threadIdx.x % kWarp;
  if (lane == 0) partial[threadIdx.x / kWarp] = __popc(votes);
  __syncthreads();
  int before = __popc(votes & ((1u << lane) - 1));
  total = 0;
  for (unsigned warp = 0; warp < blockDim.x / kWarp; ++warp) {
    if (warp < threadIdx.x / kWarp) before += partial[warp];
    total += partial[warp];
  }
  __syncthreads();
  return before;
}

}  // namespace heavywater::cuda
