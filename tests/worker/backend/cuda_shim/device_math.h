// CUDA's arithmetic intrinsics.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

// In CUDA these are in the global namespace.
using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

// glibc declares functions of these names for itself.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
// Never contracted to a fused multiply-add.
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __ddiv_rn(double x, double y) { return x / y; }

inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline unsigned __float2uint_rn(float x) { return static_cast<unsigned>(rintf(x)); }
inline int __double2int_rn(double x) { return static_cast<int>(rint(x)); }
inline long long __double2ll_rn(double x) { return llrint(x); }  // NOLINT(google-runtime-int)
inline long long __float2ll_rn(float x) { return llrintf(x); }   // NOLINT(google-runtime-int)
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
inline float __ll2float_rn(long long x) { return static_cast<float>(x); }     // NOLINT
inline double __ll2double_rn(long long x) { return static_cast<double>(x); }  // NOLINT

inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline long long __double_as_longlong(double x) { return std::bit_cast<long long>(x); }  // NOLINT
inline double __longlong_as_double(long long x) { return std::bit_cast<double>(x); }     // NOLINT

inline int __popc(unsigned x) { return std::popcount(x); }
inline int __popcll(unsigned long long x) { return std::popcount(x); }  // NOLINT
inline int __clz(int x) { return std::countl_zero(static_cast<unsigned>(x)); }
inline int __clzll(long long x) { return std::countl_zero(static_cast<uint64_t>(x)); }  // NOLINT
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }  // NOLINT(google-runtime-int)
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; ++i) reversed |= (x >> i & 1u) << (31 - i);
  return reversed;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((uint64_t{high} << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((uint64_t{high} << 32 | low) >> (shift & 31));
}
inline int __mulhi(int x, int y) { return static_cast<int>(int64_t{x} * y >> 32); }
inline unsigned __umulhi(unsigned x, unsigned y) {
  return static_cast<unsigned>(uint64_t{x} * y >> 32);
}
inline int __mul24(int x, int y) { return x * y; }
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const uint64_t bytes = uint64_t{y} << 32 | x;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned select = selector >> (4 * i) & 0xf;
    auto byte = static_cast<unsigned>(bytes >> (8 * (select & 7)) & 0xff);
    if ((select & 8) != 0) byte = (byte & 0x80) != 0 ? 0xff : 0;  // its sign
    result |= byte << (8 * i);
  }
  return result;
}

// Four products of bytes each, added to `sum`.
template <typename A, typename B, typename Sum>
constexpr Sum HwShimDp4a(unsigned a, unsigned b, Sum sum) {
  for (int i = 0; i < 4; ++i) {
    sum += static_cast<Sum>(static_cast<A>(a >> (8 * i))) *
           static_cast<Sum>(static_cast<B>(b >> (8 * i)));
  }
  return sum;
}
inline int __dp4a(int a, int b, int sum) {
  return HwShimDp4a<int8_t, int8_t, int>(static_cast<unsigned>(a), static_cast<unsigned>(b), sum);
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  return HwShimDp4a<uint8_t, uint8_t, unsigned>(a, b, sum);
}

inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
