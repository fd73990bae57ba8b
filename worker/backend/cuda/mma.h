// The tensor cores' smallest product of bf16 matrices.
#pragma once

#include "worker/backend/cuda/device_code.h"
#if !defined(__CUDACC__)
#include "cuda_shim_mma.h"
#endif

namespace heavywater::cuda {

// c += a b, by a warp: a is 16 x 16, b is 16 x 8, both bf16, c is 16 x 8. With
// g = lane / 4 and t = lane % 4, of two halves in a word the lower one first:
//   a[0], a[1]: rows g, g + 8, columns 2t and 2t + 1; a[2], a[3]: 8 columns further
//   b[0]: rows 2t and 2t + 1 of column g; b[1]: 8 rows further
//   c[0], c[1]: row g, columns 2t and 2t + 1; c[2], c[3]: row g + 8
// Products are exact; they are added in fp32, on a device with truncation.
__device__ __forceinline__ void MultiplyAdd(const unsigned (&a)[4], unsigned b0, unsigned b1,
                                            float (&c)[4]) {
#if defined(__CUDACC__)
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
  cuda_shim::MultiplyAdd(a, b0, b1, c);
#endif
}

// A float as the sum of bf16 terms, largest first: two leave 2^-18 of it, three 2^-27.
template <int kTerms>
struct BFloat16Terms {
  uint16_t bits[kTerms];
};
template <int kTerms>
__device__ __forceinline__ BFloat16Terms<kTerms> SplitToBFloat16(float value) {
  BFloat16Terms<kTerms> terms;
#pragma unroll
  for (int i = 0; i < kTerms; ++i) {
    terms.bits[i] = FloatToBFloat16Bits(value);
    value -= BFloat16ToFloat(terms.bits[i]);  // exact
  }
  return terms;
}

__device__ __forceinline__ unsigned PackHalves(uint16_t lower, uint16_t upper) {
  return static_cast<unsigned>(upper) << 16 | lower;
}

}  // namespace heavywater::cuda
