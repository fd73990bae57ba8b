// Sums and maxima over the lanes of a warp, in an order that depends on nothing
// but the lanes.
#pragma once

#include "worker/backend/cuda/device_code.h"

namespace heavywater::cuda {

__device__ __forceinline__ float WarpMax(float value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

__device__ __forceinline__ double WarpSum(double value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

// Sums each of kCount values (a power of two) over kLanes neighbouring lanes, and
// leaves each sum in one place only: half of the values go to the other half of
// the lanes at each step, kCount - 1 shuffles instead of kCount * log2(kLanes).
// Then values[0 .. max(1, kCount / kLanes)) of a lane are sums number FirstSum()
// and following; with fewer values than lanes, neighbouring lanes hold the same.
// A sum's bits do not depend on kCount.
template <int kLanes, int kCount>
struct ScatteredSums {
  template <int kOffset, int kLeft>
  __device__ __forceinline__ static void Step(float* values) {
    if constexpr (kOffset > 0) {
      const bool upper = (threadIdx.x & kOffset) != 0;
      if constexpr (kLeft > 1) {
#pragma unroll
        for (int i = 0; i < kLeft / 2; ++i) {
          const float kept = upper ? values[i + kLeft / 2] : values[i];
          const float sent = upper ? values[i] : values[i + kLeft / 2];
          values[i] = kept + __shfl_xor_sync(kAllLanes, sent, kOffset);
        }
      } else {
        values[0] += __shfl_xor_sync(kAllLanes, values[0], kOffset);
      }
      Step<kOffset / 2, (kLeft > 1 ? kLeft / 2 : 1)>(values);
    }
  }

  static constexpr int kSumsPerLane = kCount > kLanes ? kCount / kLanes : 1;
  // Lanes that hold the same sums.
  static constexpr int kCopies = kCount < kLanes ? kLanes / kCount : 1;

  __device__ __forceinline__ static void Sum(float (&values)[kCount]) {
    Step<kLanes / 2, kCount>(values);
  }
  __device__ __forceinline__ static int FirstSum() {
    return static_cast<int>(threadIdx.x % kLanes) / kCopies * kSumsPerLane;
  }
};

}  // namespace heavywater::cuda
