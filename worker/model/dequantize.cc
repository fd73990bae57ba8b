#include "worker/model/dequantize.h"

#include <bit>
#include <cstring>

#include "cache_service/base/check.h"

namespace heavywater {
namespace {

constexpr int kBlock = 32;  // values in a block of Q8_0 and Q4_1

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

// A scale and a minimum, then 16 bytes: the low nibbles are the first 16
// values, the high nibbles the others.
void DequantizeQ4_1(const std::byte* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += kBlock, from += 4 + kBlock / 2, to += kBlock) {
    const float scale = HalfToFloat(LoadHalf(from));
    const float minimum = HalfToFloat(LoadHalf(from + 2));
    const auto* quants = reinterpret_cast<const uint8_t*>(from + 4);
    for (int j = 0; j < kBlock / 2; ++j) {
      to[j] = static_cast<float>(quants[j] & 0x0f) * scale + minimum;
    }
    for (int j = 0; j < kBlock / 2; ++j) {
      to[j + kBlock / 2] = static_cast<float>(quants[j] >> 4) * scale + minimum;
    }
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
    case TensorType::kQ8_0:
      return DequantizeQ8_0(from, count, out.data());
    case TensorType::kQ4_1:
      return DequantizeQ4_1(from, count, out.data());
  }
  HW_CHECK(false);  // ParseGguf() admits no other type
}

}  // namespace heavywater
