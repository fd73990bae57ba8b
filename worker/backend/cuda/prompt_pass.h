// A chunk of an exact prompt on the device: what its kernels are given, and their
// launchers. Rows of a KV head are its group's queries: row r is token r / group_size,
// head r % group_size of the group. Slot == position.
#pragma once

#include <cuda_runtime.h>

#include "worker/backend/cuda/attend_wave.h"
#include "worker/cache/kv_dtype.h"

namespace heavywater::cuda {

struct PromptPass {
  const void* keys;      // [num_kv_heads][capacity][head_dim]
  const void* values;    // likewise
  int64_t* gains;        // [num_kv_heads][capacity]
  const float* queries;  // [num_tokens][num_query_heads][head_dim]
  float* out;            // likewise
  SplitSum* totals;      // [num_kv_heads][num_tokens * group_size] largest logit, sum
  int64_t capacity;
  int32_t num_query_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t num_tokens;
  int32_t first_position;
  int32_t score_from;  // queries from this position on add to the gains
  float scale;
  double pivotal_margin;  // above 0: gains count probabilities above it / (position + 1)

  __host__ __device__ __forceinline__ int GroupSize() const {
    return num_query_heads / num_kv_heads;
  }
  __host__ __device__ __forceinline__ int NumRows() const { return num_tokens * GroupSize(); }
  __device__ __forceinline__ int PositionOfRow(int row) const {
    return first_position + row / GroupSize();
  }
  // Where a row lies in queries and out.
  __device__ __forceinline__ int64_t Offset(int kv_head, int row) const {
    const int64_t token = row / GroupSize();
    const int head = kv_head * GroupSize() + row % GroupSize();
    return (token * num_query_heads + head) * head_dim;
  }
  __device__ __forceinline__ SplitSum* TotalOfRow(int kv_head, int row) const {
    return totals + static_cast<int64_t>(kv_head) * NumRows() + row;
  }
};

// Online softmax over tiles of keys: outputs, and each row's total.
cudaError_t LaunchPromptAttend(KvDtype dtype, const PromptPass& pass, cudaStream_t stream);

// Second sweep: the scored rows' logits again, now with their totals, to column sums
// of probabilities. After LaunchPromptAttend.
cudaError_t LaunchPromptGains(KvDtype dtype, const PromptPass& pass, cudaStream_t stream);

}  // namespace heavywater::cuda
