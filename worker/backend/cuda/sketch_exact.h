// Arithmetic of sketches, which are the same bytes on every backend: each operation
// rounds on its own, as the host's code does (sketch_encoding.cc), so the compiler
// must not fuse a product with a sum.
#pragma once

#include "worker/backend/cuda/device_code.h"
#include "worker/cache/kv_element.h"

namespace heavywater::cuda {

__device__ __forceinline__ float Times(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float Plus(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float Over(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ double Times(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ double Plus(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double Over(double a, double b) { return __ddiv_rn(a, b); }

// Largest finite half: what lies beyond is stored as this (float16.h).
inline constexpr float kLargestHalf = 65504;

__device__ __forceinline__ uint16_t FloatToHalfSaturated(float value) {
  if (value > kLargestHalf) return 0x7bff;
  if (value < -kLargestHalf) return 0xfbff;
  if (value != value)
    return static_cast<uint16_t>((__float_as_uint(value) >> 16 & 0x8000u) | 0x7e00u);
  return FloatToHalf(value);
}

// Minimum and maximum as std::min and std::max have them: the first of equals.
__device__ __forceinline__ float Least(float a, float b) { return b < a ? b : a; }
__device__ __forceinline__ float Largest(float a, float b) { return a < b ? b : a; }

// Element types as they are loaded, and what they mean.
template <typename T>
struct RawElement {
  using Type = uint16_t;
};
template <>
struct RawElement<float> {
  using Type = float;
};
template <typename T>
__device__ __forceinline__ float RawToFloat(typename RawElement<T>::Type raw);
template <>
__device__ __forceinline__ float RawToFloat<float>(float raw) {
  return raw;
}
template <>
__device__ __forceinline__ float RawToFloat<BFloat16>(uint16_t raw) {
  return BFloat16ToFloat(raw);
}
template <>
__device__ __forceinline__ float RawToFloat<Float16>(uint16_t raw) {
  return HalfToFloat(raw);
}

}  // namespace heavywater::cuda
