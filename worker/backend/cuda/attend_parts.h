// Partial results of a query row: how they add up, and what becomes of their weights.
#pragma once

#include <cmath>

#include "worker/backend/cuda/attend_wave.h"
#include "worker/backend/cuda/gain.h"
#include "worker/backend/cuda/warp_reduce.h"
#include "worker/backend/cuda/wave_token.h"

namespace heavywater::cuda {

__device__ __forceinline__ int LaneOfWarp() { return static_cast<int>(threadIdx.x) % kWarp; }

// What brings a part's weights to probabilities, or to shares of the total.
__device__ __forceinline__ double Factor(const SplitSum& part, const SplitSum& total) {
  if (part.maximum == -INFINITY) return 0;
  return exp(static_cast<double>(part.maximum) - static_cast<double>(total.maximum)) / total.sum;
}

// The partial results of one row, read by a warp.
struct RowParts {
  const SplitSum* sums;
  int num_splits;  // of the token's slots
  int num_parts;   // with the picks, if it has recall
  int picks;       // their index in sums and outs

  __device__ __forceinline__ int Index(int part) const { return part < num_splits ? part : picks; }
  __device__ __forceinline__ SplitSum Sum(int part) const { return Load(sums + Index(part)); }

  // Two passes over a few bytes; the order depends on the number of parts only.
  __device__ SplitSum Total() const {
    SplitSum total = {0, -INFINITY, 0};
    for (int part = LaneOfWarp(); part < num_parts; part += kWarp) {
      total.maximum = fmaxf(total.maximum, Sum(part).maximum);
    }
    total.maximum = WarpMax(total.maximum);
    for (int part = LaneOfWarp(); part < num_parts; part += kWarp) {
      const SplitSum sum = Sum(part);
      total.sum += Factor(sum, {1, total.maximum, 0}) * sum.sum;
    }
    total.sum = WarpSum(total.sum);
    return total;
  }
};

__device__ __forceinline__ RowParts PartsOfRow(const WaveScratch& scratch, int64_t row, int used,
                                               bool picks) {
  const int num_splits = NumSplits(used);
  return {scratch.sums + row * (scratch.splits + 1), num_splits, num_splits + (picks ? 1 : 0),
          scratch.splits};
}

// Of four slots, summed over the group's heads: each probability rounded on its own, or
// counted when it is above `pivotal`.
struct FourGains {
  int64_t values[4];
};
__device__ __forceinline__ void AddProbabilities(const float4& weights, double factor,
                                                 double pivotal, FourGains& gains) {
  gains.values[0] += Gain(weights.x * factor, pivotal);
  gains.values[1] += Gain(weights.y * factor, pivotal);
  gains.values[2] += Gain(weights.z * factor, pivotal);
  gains.values[3] += Gain(weights.w * factor, pivotal);
}
// Other tokens of the same sequence may add to the same slots.
__device__ __forceinline__ void AddToGains(const FourGains& gains, int64_t* to) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (gains.values[i] != 0) Add(to + i, gains.values[i]);
  }
}

}  // namespace heavywater::cuda
