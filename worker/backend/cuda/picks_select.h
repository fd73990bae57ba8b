// The best of many candidates, by a block of threads. A candidate is one integer
// key: the larger value first, of equal values the lower position, so that keys
// differ and the choice does not depend on the order in which threads found them.
#pragma once

#include <cstdint>

#include "worker/backend/cuda/device_code.h"

namespace heavywater::cuda {

// Of values above 0. No key is 0.
__device__ __forceinline__ uint64_t CandidateKey(float value, int position) {
  return uint64_t{__float_as_uint(value)} << 32 | (0xffffffffu - static_cast<unsigned>(position));
}
__device__ __forceinline__ float ValueOfKey(uint64_t key) {
  return __uint_as_float(static_cast<unsigned>(key >> 32));
}
__device__ __forceinline__ int PositionOfKey(uint64_t key) {
  return static_cast<int>(0xffffffffu - static_cast<unsigned>(key));
}

inline constexpr int kSelectBits = 8;  // of a key, decided at a time
inline constexpr int kSelectBins = 1 << kSelectBits;

// In shared memory.
struct SelectSpace {
  int32_t bins[kSelectBins];
  int32_t bin;      // the chosen one
  int32_t above;    // keys in the bins above it
  int32_t counter;  // of kept keys
  int32_t unused;
};

// By the first warp: the bin of the key number `rank` (from 1, the largest first).
__device__ __forceinline__ void FindBin(int rank, SelectSpace& space) {
  constexpr int kBinsPerLane = kSelectBins / kWarp;
  const int lane = static_cast<int>(threadIdx.x);
  const int highest = kSelectBins - 1 - lane * kBinsPerLane;
  int sum = 0;
  for (int i = 0; i < kBinsPerLane; ++i) sum += space.bins[highest - i];
  int through = sum;  // keys in this lane's bins and above
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int before = __shfl_up_sync(kAllLanes, through, offset);
    if (lane >= offset) through += before;
  }
  int above = through - sum;
  if (above >= rank || through < rank) return;
  for (int bin = highest;; --bin) {
    if (above + space.bins[bin] >= rank) {
      space.bin = bin;
      space.above = above;
      return;
    }
    above += space.bins[bin];
  }
}

// A key such that exactly `best` of the keys are at least it; there are more than
// `best`. keys(i) for i < count, 0: none there. All threads of the block.
template <typename Keys>
__device__ uint64_t LeastOfBest(const Keys& keys, int count, int best, SelectSpace& space) {
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  uint64_t decided = 0;  // bits of the result
  uint64_t mask = 0;     // which
  int rank = best;       // among keys with these bits
  for (int shift = 64 - kSelectBits; shift >= 0; shift -= kSelectBits) {
    for (int i = thread; i < kSelectBins; i += threads) space.bins[i] = 0;
    __syncthreads();
    for (int i = thread; i < count; i += threads) {
      const uint64_t key = keys(i);
      if (key != 0 && (key & mask) == decided) {
        atomicAdd(&space.bins[key >> shift & (kSelectBins - 1)], 1);
      }
    }
    __syncthreads();
    if (thread < kWarp) FindBin(rank, space);
    __syncthreads();
    const int bin = space.bin;
    rank -= space.above;
    const bool all_of_bin = space.bins[bin] == rank;
    decided |= static_cast<uint64_t>(bin) << shift;
    mask |= uint64_t{kSelectBins - 1} << shift;
    __syncthreads();  // before the bins are used again
    if (all_of_bin) break;
  }
  return decided;
}

// Moves the keys of at least `least` to the front. Returns how many, in any order.
__device__ __forceinline__ int KeepKeys(uint64_t* keys, int count, uint64_t least,
                                        SelectSpace& space) {
  const int threads = static_cast<int>(blockDim.x);
  if (threadIdx.x == 0) space.counter = 0;
  for (int base = 0; base < count; base += threads) {
    const int i = base + static_cast<int>(threadIdx.x);
    const uint64_t key = i < count ? keys[i] : 0;
    __syncthreads();  // all have read; what is written next lies before what is read next
    if (key != 0 && key >= least) keys[atomicAdd(&space.counter, 1)] = key;
  }
  __syncthreads();
  return space.counter;
}

// Ascending, in place. A network whose exchanges all move the larger value up: what
// would lie beyond `count` counts as larger than everything.
__device__ __forceinline__ void SortAscending(int32_t* values, int count) {
  const int threads = static_cast<int>(blockDim.x);
  for (int size = 2; size < 2 * count; size *= 2) {
    for (int distance = size / 2; distance > 0; distance /= 2) {
      // The first step of a merge compares mirrored places.
      const int flip = distance == size / 2 ? size - 1 : distance;
      for (int i = static_cast<int>(threadIdx.x); i < count; i += threads) {
        const int other = i ^ flip;
        if (other <= i || other >= count) continue;
        const int32_t lower = values[i];
        const int32_t upper = values[other];
        if (lower > upper) {
          values[i] = upper;
          values[other] = lower;
        }
      }
      __syncthreads();
    }
  }
}

}  // namespace heavywater::cuda
