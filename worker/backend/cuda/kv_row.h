// Eight consecutive channels of a K or V row: what one lane loads at a time, 16
// bytes of bf16 or fp16, or 32 of fp32.
#pragma once

#include "worker/backend/cuda/device_code.h"
#include "worker/cache/kv_element.h"

namespace heavywater::cuda {

inline constexpr int kLaneChannels = 8;

// As stored, so that loads in flight cost few registers.
template <typename T>
struct KvPack {
  uint4 words;
};
template <>
struct KvPack<float> {
  float4 lower;
  float4 upper;
};

// `row` is 16-byte aligned. Of an address that must not be read: zeros.
template <typename T>
__device__ __forceinline__ KvPack<T> LoadPack(const T* row, bool present) {
  KvPack<T> pack = {make_uint4(0, 0, 0, 0)};
  if (present) pack.words = LoadOnce(reinterpret_cast<const uint4*>(row));
  return pack;
}
__device__ __forceinline__ KvPack<float> LoadPack(const float* row, bool present) {
  KvPack<float> pack = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
  if (present) {
    pack.lower = LoadOnce(reinterpret_cast<const float4*>(row));
    pack.upper = LoadOnce(reinterpret_cast<const float4*>(row) + 1);
  }
  return pack;
}

template <typename T>
__device__ __forceinline__ float HalfOfWord(unsigned half);
template <>
__device__ __forceinline__ float HalfOfWord<BFloat16>(unsigned half) {
  return BFloat16ToFloat(static_cast<uint16_t>(half));
}
template <>
__device__ __forceinline__ float HalfOfWord<Float16>(unsigned half) {
  return HalfToFloat(static_cast<uint16_t>(half));
}

template <typename T>
__device__ __forceinline__ void Unpack(const KvPack<T>& pack, float (&values)[kLaneChannels]) {
  const unsigned words[4] = {pack.words.x, pack.words.y, pack.words.z, pack.words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = HalfOfWord<T>(words[i] & 0xffffu);
    values[2 * i + 1] = HalfOfWord<T>(words[i] >> 16);
  }
}
__device__ __forceinline__ void Unpack(const KvPack<float>& pack, float (&values)[kLaneChannels]) {
  values[0] = pack.lower.x;
  values[1] = pack.lower.y;
  values[2] = pack.lower.z;
  values[3] = pack.lower.w;
  values[4] = pack.upper.x;
  values[5] = pack.upper.y;
  values[6] = pack.upper.z;
  values[7] = pack.upper.w;
}

}  // namespace heavywater::cuda
