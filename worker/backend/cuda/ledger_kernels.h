// Kernels on scores: 64-bit integers, so that the order of sums does not matter.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace heavywater::cuda {

// to[set][slot] = sum of the gains [heads of the set][capacity], which become 0.
struct GainsParams {
  int64_t* gains;
  int64_t* to;  // [num_sets][used]
  int64_t capacity;
  int64_t used;
  int32_t num_sets;
  int32_t heads_per_set;
};
cudaError_t LaunchCollectGains(const GainsParams& params, cudaStream_t stream);

cudaError_t LaunchSumRows(const int64_t* from, int64_t* to, int64_t num_rows, int64_t count,
                          cudaStream_t stream);

struct ScoresParams {
  int64_t* scores;      // [num_sets][capacity]
  const int64_t* from;  // [num_sets][used]
  int64_t capacity;
  int64_t used;
  double decay;
  int32_t num_sets;
};
cudaError_t LaunchAddScores(const ScoresParams& params, cudaStream_t stream);

// `reach` neighbours on each side, at most kMaxReach.
inline constexpr int kMaxReach = 512;
struct PoolParams {
  const int64_t* from;  // [num_rows][count]
  int64_t* to;          // likewise
  int64_t count;
  int32_t num_rows;
  int32_t reach;
  bool maximum;  // else the sum
};
cudaError_t LaunchPoolVotes(const PoolParams& params, cudaStream_t stream);

}  // namespace heavywater::cuda
