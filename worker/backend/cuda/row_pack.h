// What one lane of decode attention loads of a K or V row: eight channels, or four where
// so many query heads share the row that their sums fill the registers.
#pragma once

#include "worker/backend/cuda/kv_row.h"

namespace heavywater::cuda {

// Half a KvPack: 8 bytes of bf16 or fp16, or 16 of fp32.
template <typename T>
struct HalfPack {
  uint2 words;
};
template <>
struct HalfPack<float> {
  float4 words;
};

template <typename T>
__device__ __forceinline__ HalfPack<T> LoadHalfPack(const T* row, bool present) {
  HalfPack<T> pack = {make_uint2(0, 0)};
  if (present) pack.words = LoadOnce(reinterpret_cast<const uint2*>(row));
  return pack;
}
__device__ __forceinline__ HalfPack<float> LoadHalfPack(const float* row, bool present) {
  HalfPack<float> pack = {make_float4(0, 0, 0, 0)};
  if (present) pack.words = LoadOnce(reinterpret_cast<const float4*>(row));
  return pack;
}

template <typename T>
__device__ __forceinline__ void Unpack(const HalfPack<T>& pack,
                                       float (&values)[kLaneChannels / 2]) {
  const unsigned words[2] = {pack.words.x, pack.words.y};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    values[2 * i] = HalfOfWord<T>(words[i] & 0xffffu);
    values[2 * i + 1] = HalfOfWord<T>(words[i] >> 16);
  }
}
__device__ __forceinline__ void Unpack(const HalfPack<float>& pack,
                                       float (&values)[kLaneChannels / 2]) {
  values[0] = pack.words.x;
  values[1] = pack.words.y;
  values[2] = pack.words.z;
  values[3] = pack.words.w;
}

// `row` is aligned to the pack. Of an address that must not be read: zeros.
template <int kChannels, typename T>
__device__ __forceinline__ auto LoadRow(const T* row, bool present) {
  static_assert(kChannels == kLaneChannels || kChannels == kLaneChannels / 2);
  if constexpr (kChannels == kLaneChannels) {
    return LoadPack(row, present);
  } else {
    return LoadHalfPack(row, present);
  }
}

}  // namespace heavywater::cuda
