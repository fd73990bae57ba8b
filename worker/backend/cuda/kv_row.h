// Eight consecutive channels of a K or V row: what one lane loads at a time, 16
// bytes of bf16 or 32 of fp32.
#pragma once

#include "worker/backend/cuda/device_code.h"

namespace heavywater::cuda {

inline constexpr int kLaneChannels = 8;

// As stored, so that loads in flight cost few registers.
template <typename T>
struct KvPack;
template <>
struct KvPack<uint16_t> {
  uint4 words;
};
template <>
struct KvPack<float> {
  float4 lower;
  float4 upper;
};

// `row` is 16-byte aligned. Of an address that must not be read: zeros.
__device__ __forceinline__ KvPack<uint16_t> LoadPack(const uint16_t* row, bool present) {
  KvPack<uint16_t> pack = {make_uint4(0, 0, 0, 0)};
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

__device__ __forceinline__ void Unpack(unsigned word, float& lower, float& upper) {
  lower = __uint_as_float(word << 16);
  upper = __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ void Unpack(const KvPack<uint16_t>& pack,
                                       float (&values)[kLaneChannels]) {
  Unpack(pack.words.x, values[0], values[1]);
  Unpack(pack.words.y, values[2], values[3]);
  Unpack(pack.words.z, values[4], values[5]);
  Unpack(pack.words.w, values[6], values[7]);
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
