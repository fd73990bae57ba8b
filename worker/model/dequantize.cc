#include "worker/model/dequantize.h"

#include <bit>
#include <cstring>

#include "cache_service/base/bfloat16.h"
#include "cache_service/base/check.h"
#include "worker/model/k_quants.h"

namespace heavywater {
namespace {

constexpr int kBlock = 32;  // values in a block of Q8_0, Q4_0, Q4_1, Q5_0 and Q5_1

uint16_t LoadHalf(const std::byte* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  return half;
}

void DequantizeF16(const std::byte* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = HalfToFloat(LoadHalf(from + 2 * i));
}

// A scale, then 32 signed bytes.
void DequantizeQ8_0(const std::byte* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kBlock, from += 2 + kBlock, to += kBlock) {
    const float scale = HalfToFloat(LoadHalf(from));
    const auto* quants = reinterpret_cast<const int8_t*>(from + 2);
    for (int j = 0; j < kBlock; ++j) to[j] = static_cast<float>(quants[j]) * scale;
  }
}

void DequantizeBF16(const std::byte* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = BFloat16ToFloat(LoadHalf(from + 2 * i));
}

// The 16 bytes of nibbles of a block: the low ones are its first 16 values, the high
// ones the others. `fifth` gives bit 4 of value j. to[j] = value(quant).
template <class Fifth, class Value>
void UnpackNibbles(const std::byte* from, const Fifth& fifth, const Value& value, float* to) {
  const auto* quants = reinterpret_cast<const uint8_t*>(from);
  constexpr int kHalf = kBlock / 2;
  for (int j = 0; j < kHalf; ++j) to[j] = value((quants[j] & 0x0f) | fifth(j));
  for (int j = kHalf; j < kBlock; ++j) to[j] = value((quants[j - kHalf] >> 4) | fifth(j));
}

int NoFifth(int) { return 0; }

// Bit 4 of each value, in 32 bits.
auto FifthBits(const std::byte* from) {
  uint32_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return [bits](int j) { return static_cast<int>((bits >> j) & 1) << 4; };
}

// A scale, then nibbles around 8.
void DequantizeQ4_0(const std::byte* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kBlock, from += 2 + kBlock / 2, to += kBlock) {
    const float scale = HalfToFloat(LoadHalf(from));
    UnpackNibbles(
        from + 2, NoFifth, [&](int quant) { return static_cast<float>(quant - 8) * scale; }, to);
  }
}

// A scale and a minimum, then nibbles.
void DequantizeQ4_1(const std::byte* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kBlock, from += 4 + kBlock / 2, to += kBlock) {
    const float scale = HalfToFloat(LoadHalf(from));
    const float minimum = HalfToFloat(LoadHalf(from + 2));
    UnpackNibbles(
        from + 4, NoFifth, [&](int quant) { return static_cast<float>(quant) * scale + minimum; },
        to);
  }
}

// A scale, the fifth bits, nibbles; around 16.
void DequantizeQ5_0(const std::byte* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kBlock, from += 6 + kBlock / 2, to += kBlock) {
    const float scale = HalfToFloat(LoadHalf(from));
    UnpackNibbles(
        from + 6, FifthBits(from + 2),
        [&](int quant) { return static_cast<float>(quant - 16) * scale; }, to);
  }
}

// A scale and a minimum, the fifth bits, nibbles.
void DequantizeQ5_1(const std::byte* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kBlock, from += 8 + kBlock / 2, to += kBlock) {
    const float scale = HalfToFloat(LoadHalf(from));
    const float minimum = HalfToFloat(LoadHalf(from + 2));
    UnpackNibbles(
        from + 8, FifthBits(from + 4),
        [&](int quant) { return static_cast<float>(quant) * scale + minimum; }, to);
  }
}

}  // namespace

float HalfToFloat(uint16_t half) {
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16;
  const uint32_t magnitude = half & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity and NaN
    return std::bit_cast<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  }
  if (magnitude < 0x0400u) {  // zero and subnormal: units of 2^-24
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return sign != 0 ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + (uint32_t{127 - 15} << 23)));
}

void DequantizeRows(const GgufTensor& tensor, int64_t first_row, int64_t num_rows,
                    std::span<float> out) {
  HW_CHECK(first_row >= 0 && num_rows >= 0 && first_row + num_rows <= tensor.rows);
  const int64_t count = num_rows * tensor.row_elements;
  HW_CHECK(static_cast<int64_t>(out.size()) == count);
  const std::byte* from = tensor.data.data() + first_row * tensor.row_bytes;
  switch (tensor.type) {
    case TensorType::kF32:
      if (count > 0) std::memcpy(out.data(), from, out.size_bytes());
      return;
    case TensorType::kF16:
      return DequantizeF16(from, count, out.data());
    case TensorType::kBF16:
      return DequantizeBF16(from, count, out.data());
    case TensorType::kQ4_0:
      return DequantizeQ4_0(from, count, out.data());
    case TensorType::kQ8_0:
      return DequantizeQ8_0(from, count, out.data());
    case TensorType::kQ4_1:
      return DequantizeQ4_1(from, count, out.data());
    case TensorType::kQ5_0:
      return DequantizeQ5_0(from, count, out.data());
    case TensorType::kQ5_1:
      return DequantizeQ5_1(from, count, out.data());
    case TensorType::kQ4_K:
      return DequantizeQ4K(from, count, out.data());
    case TensorType::kQ5_K:
      return DequantizeQ5K(from, count, out.data());
    case TensorType::kQ6_K:
      return DequantizeQ6K(from, count, out.data());
  }
  HW_CHECK(false);  // ParseGguf() admits no other type
}

}  // namespace heavywater
