// Kernels that turn keys and queries to their places in the cache.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "worker/cache/kv_dtype.h"

namespace heavywater::cuda {

// Keys of neighbouring slots of one set, for the KV heads that share it.
struct RotateKeysPass {
  const unsigned char* keys;  // [num_kv_heads][capacity][head_dim]
  unsigned char* to;          // likewise
  const int32_t* places;      // [count], of the slots from first_slot on
  const float* angles;        // [num_places][head_dim]
  int64_t capacity;
  int64_t first_slot;
  int32_t count;
  int32_t first_kv_head;
  int32_t heads;
  int32_t head_dim;
};
cudaError_t LaunchRotateKeys(KvDtype dtype, const RotateKeysPass& pass, cudaStream_t stream);

struct RotateQueriesPass {
  const float* from;      // [num_rows][num_query_heads][head_dim]
  float* to;              // likewise
  const int32_t* places;  // [num_rows], below 0: copied
  const float* angles;
  int64_t num_rows;
  int32_t num_query_heads;
  int32_t head_dim;
};
cudaError_t LaunchRotateQueries(const RotateQueriesPass& pass, cudaStream_t stream);

}  // namespace heavywater::cuda
