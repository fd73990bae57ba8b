// What kernels are written in. With nvcc this is CUDA; the tests also compile the
// same sources against a host shim of the CUDA execution model
// (tests/worker/backend/cuda_shim, found first as <cuda_runtime.h>), which counts
// the bytes that go through the functions below.
//
// Rules that keep a kernel runnable in both: launches go through Launch()
// (launch.h); shared memory is dynamic only, through SharedMemory(); global memory
// is read and written through Load(), Store() and Add(); warp functions are the
// _sync ones with a full mask, reached by all 32 lanes; no early return before a
// barrier.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#if !defined(__CUDACC__)
#include "cuda_shim_memory.h"  // SharedMemory() to FloatToHalf(), checked and counted
#endif

namespace heavywater::cuda {

inline constexpr int kWarp = 32;
inline constexpr unsigned kAllLanes = 0xffffffffu;

#if defined(__CUDACC__)

// The block's dynamic shared memory, 16-byte aligned.
__device__ __forceinline__ unsigned char* SharedMemory() {
  extern __shared__ __align__(16) unsigned char hw_shared_memory[];
  return hw_shared_memory;
}

// T of 1, 2, 4, 8 or 16 bytes, aligned.
template <typename T>
__device__ __forceinline__ T Load(const T* address) {
  return *address;
}
// Read once: passes the L2 cache by where it can (K and V of a long cache).
template <typename T>
__device__ __forceinline__ T LoadOnce(const T* address) {
  return __ldcs(address);
}
template <typename T>
__device__ __forceinline__ void Store(T* address, std::type_identity_t<T> value) {
  *address = value;
}
// Host memory that the device reaches over the bus; registered.
template <typename T>
__device__ __forceinline__ T LoadHost(const T* address) {
  return __ldcv(address);
}
template <typename T>
__device__ __forceinline__ void StoreHost(T* address, std::type_identity_t<T> value) {
  __stwt(address, value);
}
// Integers only: their sum does not depend on the order.
__device__ __forceinline__ void Add(int64_t* address, int64_t value) {
  atomicAdd(reinterpret_cast<unsigned long long*>(address), static_cast<unsigned long long>(value));
}
__device__ __forceinline__ float HalfToFloat(uint16_t bits) {
  float value;
  asm("{ .reg .f16 h; mov.b16 h, %1; cvt.f32.f16 %0, h; }" : "=f"(value) : "h"(bits));
  return value;
}
// As FloatToFloat16() of cache_service/base, bit for bit: to the nearest, at most
// +-65504; NaN stays NaN.
__device__ __forceinline__ uint16_t FloatToHalf(float value) {
  if (value != value)
    return static_cast<uint16_t>((__float_as_uint(value) >> 16 & 0x8000u) | 0x7e00u);
  const float held = fminf(fmaxf(value, -65504.0f), 65504.0f);
  uint16_t bits;
  asm("{ .reg .f16 h; cvt.rn.f16.f32 h, %1; mov.b16 %0, h; }" : "=h"(bits) : "f"(held));
  return bits;
}

#endif

__device__ __forceinline__ float BFloat16ToFloat(uint16_t bits) {
  return __uint_as_float(static_cast<unsigned>(bits) << 16);
}
// Round to nearest even; NaN stays NaN.
__device__ __forceinline__ uint16_t FloatToBFloat16Bits(float value) {
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// A probability as the 64-bit fixed point in which scores are kept: 2^-32, round
// half to even, as the CPU's kernels do.
__device__ __forceinline__ int64_t ToFixedPoint(double probability) {
  return static_cast<int64_t>(rint(probability * 4294967296.0));
}

}  // namespace heavywater::cuda
