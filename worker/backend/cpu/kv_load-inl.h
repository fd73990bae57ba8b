// KV elements as float vectors. Per-target include guard: see
// hwy/foreach_target.h.
#if defined(HEAVYWATER_KV_LOAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEAVYWATER_KV_LOAD_INL_H_
#undef HEAVYWATER_KV_LOAD_INL_H_
#else
#define HEAVYWATER_KV_LOAD_INL_H_
#endif

#include <cstdint>
#include <type_traits>

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

// Two vectors of elements in an order that is cheap to load: with
// kSplitsPairs those of even and then those of odd index, else as they lie.
template <typename T>
inline constexpr bool kSplitsPairs = std::is_same_v<T, BFloat16>;
template <class D, typename T>
HWY_INLINE void LoadKvPair(D d, const T* from, hn::Vec<D>& first, hn::Vec<D>& second) {
  if constexpr (kSplitsPairs<T>) {
    // Two bfloat16 to a word of 32 bits: one shift and one mask make two vectors.
    const hn::RebindToUnsigned<D> words;
    const auto pairs = hn::LoadU(words, reinterpret_cast<const uint32_t*>(from));
#if HWY_TARGET == HWY_AVX2
    // By a shuffle: shifts share their ports with the arithmetic there.
    const hn::Repartition<uint8_t, D> bytes;
    alignas(32) static constexpr uint8_t kUp[] = {0x80, 0x80, 0, 1, 0x80, 0x80, 4,  5,
                                                  0x80, 0x80, 8, 9, 0x80, 0x80, 12, 13};
    first = hn::BitCast(
        d, hn::TableLookupBytesOr0(hn::BitCast(bytes, pairs), hn::LoadDup128(bytes, kUp)));
#else
    first = hn::BitCast(d, hn::ShiftLeft<16>(pairs));
#endif
    second = hn::BitCast(d, hn::And(pairs, hn::Set(words, 0xffff0000u)));
  } else {
    first = LoadKv(d, from);
    second = LoadKv(d, from + hn::Lanes(d));
  }
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
