// The exponential of attention's weights. Per-target include guard: see
// hwy/foreach_target.h.
#if defined(HEAVYWATER_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEAVYWATER_EXP_INL_H_
#undef HEAVYWATER_EXP_INL_H_
#else
#define HEAVYWATER_EXP_INL_H_
#endif

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// exp(x) for x <= 88, less than 1 ulp off; 0 below -87, and of NaN. Two thirds of the time
// of Highway's Exp(), which takes any x. Range reduction by adding and subtracting
// 1.5 * 2^23, which leaves the integer in the sum's last bits; polynomial: Cephes' expf.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V ExpOfLogit(D d, V x) {
  const hn::RebindToSigned<D> ints;
  const V least = hn::Set(d, -87.0f);
  const V magic = hn::Set(d, 0x1.8p23f);
  const V shifted = hn::MulAdd(hn::Max(x, least), hn::Set(d, 0x1.715476p0f), magic);
  const V power = hn::Sub(shifted, magic);
  V r = hn::NegMulAdd(power, hn::Set(d, 0x1.63p-1f), x);
  r = hn::NegMulAdd(power, hn::Set(d, -0x1.bd0106p-13f), r);
  V p = hn::Set(d, 1.9875691500e-4f);
  for (const float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                        5.0000001201e-1f, 1.0f, 1.0f}) {
    p = hn::MulAdd(p, r, hn::Set(d, c));
  }
  const auto bits = hn::Add(hn::BitCast(ints, p), hn::ShiftLeft<23>(hn::BitCast(ints, shifted)));
  return hn::IfThenElseZero(hn::Ge(x, least), hn::BitCast(d, bits));
}

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
