// The choice of what stays. A block per set; everything in one launch.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "worker/backend/cuda/fault.h"

namespace heavywater::cuda {

struct SelectKernelParams {
  const int32_t* positions;  // [num_sets][stride]
  const int64_t* scores;     // [num_sets][stride]
  uint8_t* kept;             // [num_sets][count]
  int64_t stride;
  int64_t budget_tokens;
  int64_t sink_end;      // positions below are protected
  int64_t recent_begin;  // so are these and later ones
  int32_t count;
  int32_t num_sets;
};
cudaError_t LaunchSelect(const SelectKernelParams& params, cudaStream_t stream);

struct VictimsKernelParams {
  const int32_t* positions;  // [num_sets][stride]
  const int64_t* scores;     // [num_sets][stride]
  const uint8_t* kept;       // [num_sets][kept_stride]
  int32_t* victims;          // [num_sets][max_victims]
  int64_t* victim_scores;    // [num_sets][max_victims]
  Fault* fault;              // in host memory: more than max_victims
  int64_t stride;
  int64_t kept_stride;
  int64_t max_victims;
  int32_t used;
  int32_t num_sets;
};
cudaError_t LaunchCollectVictims(const VictimsKernelParams& params, cudaStream_t stream);

}  // namespace heavywater::cuda
