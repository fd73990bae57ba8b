// IEEE half precision, for small tables of numbers: sketches store it.
#pragma once

#include <bit>
#include <cstdint>

namespace heavywater {

inline constexpr float kMaxFloat16 = 65504;

// Rounds to nearest, ties to even; beyond +-65504, infinity included, to that.
// NaN stays NaN.
inline uint16_t FloatToFloat16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x477fe000u) return sign | 0x7bffu;  // 65504
  if (magnitude >= 0x38800000u) {                       // 2^-14: a normal number
    const uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
  }
  // Adding 0.5 leaves units of 2^-24, those of subnormal halves, in the last
  // place; the addition rounds.
  const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
  return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
}

inline float Float16ToFloat(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000u) << 16;
  const uint32_t magnitude = value & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity and NaN
    return std::bit_cast<float>(sign | 0x7f800000u | magnitude << 13);
  }
  if (magnitude >= 0x400u) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
  const float subnormal = std::bit_cast<float>(magnitude + 0x3f000000u) - 0.5f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(subnormal));
}

}  // namespace heavywater
