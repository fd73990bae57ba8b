// The keys of one page of one KV head as a block of threads reads them: as many
// rows as fit are copied to shared memory first, so that they cross the bus once.
#pragma once

#include <cstdint>

#include "worker/backend/cuda/sketch_exact.h"
#include "worker/backend/cuda/sketch_kernels.h"

namespace heavywater::cuda {

// What every GPU from sm_80 on has for a block.
inline constexpr int kStagedBytes = 96 * 1024;

struct StagedRows {
  int32_t rows;  // of the page, from its start
  int32_t bytes;
};
inline StagedRows StagedRowsOf(const SketchGeometry& geometry) {
  const int key_bytes = geometry.head_dim * ElementBytes(geometry.dtype);
  const int fit = kStagedBytes / key_bytes;
  const int rows = geometry.page_tokens < fit ? geometry.page_tokens : fit;
  return {rows, rows * key_bytes};
}

template <typename T>
struct PageKeys {
  using Raw = typename RawElement<T>::Type;

  const Raw* staged;
  const unsigned char* rows;
  int32_t num_staged;
  int32_t head_dim;

  // Of a row below the page's count.
  __device__ __forceinline__ float Key(int row, int channel) const {
    if (row < num_staged) return RawToFloat<T>(staged[row * head_dim + channel]);
    const Raw* key = reinterpret_cast<const Raw*>(rows) + int64_t{2} * row * head_dim;
    return RawToFloat<T>(LoadHost(key + channel));
  }
};

// All threads of the block; ends with a barrier.
template <typename T>
__device__ __forceinline__ PageKeys<T> StageKeys(const unsigned char* rows, int count,
                                                 int num_staged, int head_dim,
                                                 unsigned char* shared) {
  const int pieces = head_dim * static_cast<int>(sizeof(T)) / 16;  // of a key
  const int staged = count < num_staged ? count : num_staged;
  uint4* to = reinterpret_cast<uint4*>(shared);
  for (int i = threadIdx.x; i < staged * pieces; i += blockDim.x) {
    const int row = i / pieces;
    const uint4* key = reinterpret_cast<const uint4*>(rows) + int64_t{2} * row * pieces;
    to[i] = LoadHost(key + i % pieces);
  }
  __syncthreads();
  return {reinterpret_cast<const typename RawElement<T>::Type*>(shared), rows, staged, head_dim};
}

}  // namespace heavywater::cuda
