// Probabilities to 2^-32 fixed point on any vector width. Per-target include
// guard: see hwy/foreach_target.h.
#if defined(HEAVYWATER_FIXED_POINT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEAVYWATER_FIXED_POINT_INL_H_
#undef HEAVYWATER_FIXED_POINT_INL_H_
#else
#define HEAVYWATER_FIXED_POINT_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Adding 1.5 * 2^20 to a double leaves units of 2^-32 in the last place: the
// sum's bits minus the constant's are the value in fixed point, rounded half to
// even by the addition. AVX2 has no conversion from double to int64.
constexpr double kFixedPointMagic = 1.5 * (1 << 20);
constexpr int64_t kFixedPointMagicBits = 0x4138000000000000;

template <class D64>
HWY_INLINE hn::Vec<hn::RebindToSigned<D64>> FixedPointSum(D64 d64, const float* weights,
                                                          int64_t stride, const double* factors,
                                                          int num_rows) {
  const hn::Rebind<float, D64> d32;
  const hn::RebindToSigned<D64> di64;
  const auto magic = hn::Set(d64, kFixedPointMagic);
  auto total = hn::Set(di64, static_cast<int64_t>(-static_cast<uint64_t>(num_rows) *
                                                  static_cast<uint64_t>(kFixedPointMagicBits)));
  for (int row = 0; row < num_rows; ++row) {
    const auto weight = hn::PromoteTo(d64, hn::LoadU(d32, weights + row * stride));
    const auto shifted = hn::MulAdd(weight, hn::Set(d64, factors[row]), magic);
    total = hn::Add(total, hn::BitCast(di64, shifted));
  }
  return total;
}

// As DecodeKernels::add_gains. Reads weights up to the next multiple of 8.
HWY_INLINE void AddFixedPointGains(const float* weights, int64_t stride, const double* factors,
                                   int num_rows, int64_t count, int64_t* gains) {
  const hn::ScalableTag<double> d64;
  const hn::RebindToSigned<decltype(d64)> di64;
  constexpr int64_t kLanes = hn::MaxLanes(d64);
  int64_t i = 0;
  // Both have left the caches while a long context was read, and the hardware sees each row
  // for too short a while to fetch ahead.
  constexpr int64_t kAhead = 128;
  for (; i + kLanes <= count; i += kLanes) {
    __builtin_prefetch(gains + i + kAhead, /*rw=*/1, /*locality=*/3);
    if (i % 16 == 0) {
      for (int row = 0; row < num_rows; ++row) {
        __builtin_prefetch(weights + row * stride + i + kAhead, /*rw=*/0, /*locality=*/3);
      }
    }
    const auto sum = FixedPointSum(d64, weights + i, stride, factors, num_rows);
    hn::StoreU(hn::Add(hn::LoadU(di64, gains + i), sum), di64, gains + i);
  }
  if (i == count) return;
  HWY_ALIGN int64_t tail[kLanes];
  hn::Store(FixedPointSum(d64, weights + i, stride, factors, num_rows), di64, tail);
  for (int64_t k = 0; i + k < count; ++k) gains[i + k] += tail[k];
}

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
