// Kernels that move rows of K and V. Addresses are of device memory unless a name
// says host.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "worker/cache/kv_dtype.h"

namespace heavywater::cuda {

// Tables and rows of a layer's slots (LayerView).
struct LayerSlots {
  unsigned char* keys;
  unsigned char* values;
  int32_t* positions;
  int64_t* scores;
  int64_t* gains;
  int64_t capacity;
  int32_t num_sets;
  int32_t num_kv_heads;
  int64_t row_bytes;  // of K or of V
};

// New tokens of one sequence. Records are loaded by words of 8 bytes.
struct alignas(8) AppendRecord {
  LayerSlots layer;
  const float* keys;                // [num_tokens][num_kv_heads][head_dim]
  const float* values;              // likewise
  const int32_t* slots;             // [num_sets][num_tokens]
  unsigned char* const* host_rows;  // [num_tokens][num_kv_heads] of host memory, null: not written
  int32_t num_tokens;
  int32_t first_position;
};
// `most_tokens`: of any record.
cudaError_t LaunchAppend(KvDtype dtype, int head_dim, const AppendRecord* records, int num_records,
                         int num_kv_heads, int most_tokens, cudaStream_t stream);
// The rows that were appended, from their slots to their host rows.
cudaError_t LaunchWriteThrough(const AppendRecord* records, int num_records, int num_kv_heads,
                               int most_tokens, cudaStream_t stream);

// Slots [first, first + count) of every set get the rows at `kept` of another layer.
struct GatherParams {
  LayerSlots from;
  LayerSlots to;
  const int32_t* kept;   // [num_sets][count] slots of `from`; null: the slots become free
  const int64_t* seeds;  // [num_sets][seed_stride] scores by position, or null
  int64_t seed_stride;
  int64_t first;
  int64_t count;
};
cudaError_t LaunchGatherRows(const GatherParams& params, cudaStream_t stream);
cudaError_t LaunchGatherTables(const GatherParams& params, cudaStream_t stream);

// Rows of host memory into slots of one set.
struct PromoteRows {
  LayerSlots layer;
  const unsigned char* const* host_rows;  // [heads][count] of host memory
  const int32_t* slots;                   // [count], as are the next two
  const int32_t* positions;
  const int64_t* scores;
  int32_t count;
  int32_t set;
  int32_t first_kv_head;  // those that share the set
  int32_t heads;
};
cudaError_t LaunchPromote(const PromoteRows& params, cudaStream_t stream);

// Frees slots of one set.
cudaError_t LaunchRelease(const LayerSlots& layer, int set, const int32_t* slots, int count,
                          cudaStream_t stream);

}  // namespace heavywater::cuda
