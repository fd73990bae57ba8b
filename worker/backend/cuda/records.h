// Records that a block reads, and rows that a warp copies.
#pragma once

#include <type_traits>

#include "worker/backend/cuda/device_code.h"
#include "worker/backend/cuda/slot_kernels.h"

namespace heavywater::cuda {

// Copies a record to shared memory, each byte read once by the block. All threads call
// it; it ends with a barrier.
template <typename T>
__device__ __forceinline__ void LoadRecord(const T* from, T* to) {
  static_assert(sizeof(T) % sizeof(uint64_t) == 0 && alignof(T) >= sizeof(uint64_t));
  for (unsigned i = threadIdx.x; i < sizeof(T) / sizeof(uint64_t); i += blockDim.x) {
    reinterpret_cast<uint64_t*>(to)[i] = Load(reinterpret_cast<const uint64_t*>(from) + i);
  }
  __syncthreads();
}

// Loaded by one lane for its warp.
template <typename T>
__device__ __forceinline__ T LoadForWarp(const T* from) {
  T value = {};
  if (threadIdx.x % kWarp == 0) value = Load(from);
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(value), 0));
  } else {
    return __shfl_sync(kAllLanes, value, 0);
  }
}

__device__ __forceinline__ int SetOf(const LayerSlots& layer, int kv_head) {
  return layer.num_sets == 1 ? 0 : kv_head;
}
__device__ __forceinline__ uint4* KeyRow(const LayerSlots& layer, int kv_head, int64_t slot) {
  return reinterpret_cast<uint4*>(layer.keys + (kv_head * layer.capacity + slot) * layer.row_bytes);
}
__device__ __forceinline__ uint4* ValueRow(const LayerSlots& layer, int kv_head, int64_t slot) {
  return reinterpret_cast<uint4*>(layer.values +
                                  (kv_head * layer.capacity + slot) * layer.row_bytes);
}

// A slot of one KV head as it is after an append or a promotion. `of_set`: this head
// also writes what its set shares.
__device__ __forceinline__ void FillTables(const LayerSlots& layer, int kv_head, int64_t slot,
                                           bool of_set, int position, int64_t score) {
  Store(layer.gains + kv_head * layer.capacity + slot, int64_t{0});
  if (!of_set) return;
  const int64_t entry = SetOf(layer, kv_head) * layer.capacity + slot;
  Store(layer.positions + entry, static_cast<int32_t>(position));
  Store(layer.scores + entry, score);
}

}  // namespace heavywater::cuda
