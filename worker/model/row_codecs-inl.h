// Blocks of packed rows as float vectors. Per-target include guard: see
// hwy/foreach_target.h.
#if defined(HEAVYWATER_ROW_CODECS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef HEAVYWATER_ROW_CODECS_INL_H_
#undef HEAVYWATER_ROW_CODECS_INL_H_
#else
#define HEAVYWATER_ROW_CODECS_INL_H_
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace heavywater {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Each codec has kElements and kBytes of a block, and Decode(), which gives its
// values as kElements / kLanes vectors.
using RowD = hn::ScalableTag<float>;
using RowV = hn::Vec<RowD>;
inline constexpr int kLanes = static_cast<int>(hn::MaxLanes(RowD()));

HWY_INLINE RowV LoadNumber(const std::byte* from) {
  float value;
  std::memcpy(&value, from, sizeof(value));
  return hn::Set(RowD(), value);
}

// kLanes signed bytes as floats.
HWY_INLINE RowV LoadCodes(const std::byte* from) {
  const hn::Rebind<int8_t, RowD> bytes;
  const hn::RebindToSigned<RowD> words;
  return hn::ConvertTo(
      RowD(), hn::PromoteTo(words, hn::LoadU(bytes, reinterpret_cast<const int8_t*>(from))));
}

// One vector at a time; the columns that are left over are the caller's.
struct Float32Codec {
  static constexpr int kElements = kLanes;
  static constexpr int kBytes = kLanes * 4;
  static HWY_INLINE void Decode(const std::byte* from, RowV* out) {
    out[0] = hn::LoadU(RowD(), reinterpret_cast<const float*>(from));
  }
};

struct Float16Codec {
  static constexpr int kElements = 32;
  static constexpr int kBytes = 64;
  static HWY_INLINE void Decode(const std::byte* from, RowV* out) {
    const hn::Rebind<hwy::float16_t, RowD> halves;
    for (int i = 0; i < kElements / kLanes; ++i) {
      const auto* at = reinterpret_cast<const hwy::float16_t*>(from) + i * kLanes;
      out[i] = hn::PromoteTo(RowD(), hn::LoadU(halves, at));
    }
  }
};

// The upper halves of floats.
struct BFloat16Codec {
  static constexpr int kElements = 32;
  static constexpr int kBytes = 64;
  static HWY_INLINE void Decode(const std::byte* from, RowV* out) {
    const hn::Rebind<uint16_t, RowD> halves;
    const hn::RebindToUnsigned<RowD> words;
    for (int i = 0; i < kElements / kLanes; ++i) {
      const auto* at = reinterpret_cast<const uint16_t*>(from) + i * kLanes;
      out[i] = hn::BitCast(RowD(), hn::ShiftLeft<16>(hn::PromoteTo(words, hn::LoadU(halves, at))));
    }
  }
};

struct Affine4Codec {
  static constexpr int kElements = 32;
  static constexpr int kBytes = 24;
  static HWY_INLINE void Decode(const std::byte* from, RowV* out) {
    const RowD d;
    const hn::RebindToUnsigned<RowD> words;
    const hn::Rebind<uint8_t, RowD> bytes;
    const RowV scale = LoadNumber(from);
    const RowV minimum = LoadNumber(from + 4);
    const auto* codes = reinterpret_cast<const uint8_t*>(from + 8);
    const auto low_bits = hn::Set(words, 15);
    if constexpr (kLanes == 16) {
      // All 16 values that the block can have, looked up.
      const RowV values = hn::MulAdd(hn::Iota(d, 0.0f), scale, minimum);
      const auto pairs = hn::PromoteTo(words, hn::LoadU(bytes, codes));
      // The look-up takes the low four bits of an index by itself; Highway's debug builds
      // want to see no others.
      const auto low = HWY_IS_DEBUG_BUILD ? hn::And(pairs, low_bits) : pairs;
      out[0] = hn::TableLookupLanes(values, hn::IndicesFromVec(d, low));
      out[1] = hn::TableLookupLanes(values, hn::IndicesFromVec(d, hn::ShiftRight<4>(pairs)));
    } else {
      constexpr int kHalf = 16 / kLanes;
      const hn::RebindToSigned<RowD> signs;
      for (int i = 0; i < kHalf; ++i) {
        const auto pairs = hn::PromoteTo(words, hn::LoadU(bytes, codes + i * kLanes));
        const auto low = hn::ConvertTo(d, hn::BitCast(signs, hn::And(pairs, low_bits)));
        const auto high = hn::ConvertTo(d, hn::BitCast(signs, hn::ShiftRight<4>(pairs)));
        out[i] = hn::MulAdd(low, scale, minimum);
        out[i + kHalf] = hn::MulAdd(high, scale, minimum);
      }
    }
  }
};

// Signed bytes by a scale of their block.
template <int kBlock>
struct Scaled8Codec {
  static constexpr int kElements = kBlock;
  static constexpr int kBytes = 4 + kBlock;
  static HWY_INLINE void Decode(const std::byte* from, RowV* out) {
    const RowV scale = LoadNumber(from);
    for (int i = 0; i < kElements / kLanes; ++i) {
      out[i] = hn::Mul(LoadCodes(from + 4 + i * kLanes), scale);
    }
  }
};

struct Affine8Codec {
  static constexpr int kElements = 16;
  static constexpr int kBytes = 24;
  static HWY_INLINE void Decode(const std::byte* from, RowV* out) {
    const RowV scale = LoadNumber(from);
    const RowV minimum = LoadNumber(from + 4);
    for (int i = 0; i < kElements / kLanes; ++i) {
      out[i] = hn::MulAdd(LoadCodes(from + 8 + i * kLanes), scale, minimum);
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace heavywater
HWY_AFTER_NAMESPACE();

#endif  // HEAVYWATER_ROW_CODECS_INL_H_
