// KV elements as float vectors. Per-target include guard: see
// hwy/foreach_target.h.
#if defined(HEAVYWATER_KV_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEAVYWATER_KV_LOAD_INL_H_
#undef HEAVYWATER_KV_LOAD_INL_H_
#else
#define HEAVYWATER_KV_LOAD_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"
#include "worker/cache/kv_element.h"

HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

template <class D>
HWY_INLINE hn::Vec<D> LoadKv(D d, const float* from) {
  return hn::LoadU(d, from);
}

// bfloat16 is the upper half of a float.
template <class D>
HWY_INLINE hn::Vec<D> LoadKv(D d, const BFloat16* from) {
  const hn::Rebind<uint16_t, D> d16;
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::LoadU(d16, reinterpret_cast<const uint16_t*>(from));
  return hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d32, bits)));
}

template <class D>
HWY_INLINE hn::Vec<D> LoadKv(D d, const Float16* from) {
  const hn::Rebind<hwy::float16_t, D> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(from)));
}

// The first half of a vector, zero above: head sizes are multiples of 8, and a
// row may end where its memory ends.
template <class D, typename T>
HWY_INLINE hn::Vec<D> LoadKvHalf(D d, const T* from) {
  const hn::Half<D> half;
  return hn::ZeroExtendVector(d, LoadKv(half, from));
}

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
