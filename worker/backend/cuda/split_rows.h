// One split of a KV head's slots as AttendBlock reads it.
#pragma once

#include <cstdint>

#include "worker/backend/cuda/attend_block.h"
#include "worker/backend/cuda/wave_token.h"

namespace heavywater::cuda {

// Slots of one split. Positions lie in shared memory, -1 beyond the last slot.
template <typename T>
struct SlotRows {
  const T* keys;  // of the split's first slot
  const T* values;
  const int32_t* positions;
  int count;
  int head_dim;
  int position;  // the query's

  // Slots whose position is at most its own; a free one's -1 is the largest unsigned.
  __device__ __forceinline__ bool Sees(int slot) const {
    return static_cast<unsigned>(positions[slot]) <= static_cast<unsigned>(position);
  }
  // Loaded whether seen or not: positions need not have arrived.
  template <int kChannels>
  __device__ __forceinline__ auto Key(int slot, int channel) const {
    return LoadRow<kChannels>(keys + static_cast<int64_t>(slot) * head_dim + channel,
                              slot < count && channel < head_dim);
  }
  // What is not seen is not read: a free slot may hold anything.
  template <int kChannels>
  __device__ __forceinline__ auto Value(int slot, int channel) const {
    return LoadRow<kChannels>(values + static_cast<int64_t>(slot) * head_dim + channel,
                              channel < head_dim && Sees(slot));
  }
};

// Where the token's split lies. Called again for each phase, so that no registers hold
// it in between: the token lies in shared memory.
template <typename T>
__device__ __forceinline__ SlotRows<T> RowsOfSplit(const WaveShape& shape, const WaveToken& token,
                                                   int kv_head, int split,
                                                   const int32_t* positions) {
  const int first = split * kSplitSlots;
  const int64_t row = (kv_head * token.capacity + first) * shape.head_dim;
  return {static_cast<const T*>(token.keys) + row,
          static_cast<const T*>(token.values) + row,
          positions,
          min(token.used - first, kSplitSlots),
          shape.head_dim,
          token.position};
}

// Needs a barrier before they are read.
__device__ __forceinline__ void StagePositions(const WaveToken& token, int kv_head, int split,
                                               int32_t* positions) {
  const int first = split * kSplitSlots;
  const int set = token.num_sets == 1 ? 0 : kv_head;
  const int32_t* from = token.positions + set * token.capacity + first;
  for (int slot = static_cast<int>(threadIdx.x); slot < kSplitSlots; slot += kSplitThreads) {
    positions[slot] = first + slot < token.used ? Load(from + slot) : -1;
  }
}

}  // namespace heavywater::cuda
