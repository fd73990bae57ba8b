#include "worker/model/dequantize.h"

#include <bit>
#include <cstring>
#include <vector>

#include "cache_service/base/bfloat16.h"
#include "cache_service/base/check.h"
#include "worker/model/quant_groups.h"

namespace heavywater {
namespace {

uint16_t LoadHalf(const std::byte* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  return half;
}

void DequantizeF16(const std::byte* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = HalfToFloat(LoadHalf(from + 2 * i));
}

void DequantizeBF16(const std::byte* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; ++i) to[i] = BFloat16ToFloat(LoadHalf(from + 2 * i));
}

// Each product of a code and a scale is exact where there is a minimum, so that fused
// or not the sum is rounded once.
void DequantizeGroups(TensorType type, const std::byte* from, int64_t count, float* to) {
  std::vector<QuantGroup> groups(static_cast<size_t>(count / kQuantGroup));
  ReadQuantGroups(type, from, groups);
  for (const QuantGroup& group : groups) {
    for (const int8_t code : group.codes) {
      *to++ = static_cast<float>(code) * group.scale + group.minimum;
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
    case TensorType::kBF16:
      return DequantizeBF16(from, count, out.data());
    default:
      // ParseGguf() admits no type that is neither of floats nor quantised.
      return DequantizeGroups(tensor.type, from, count, out.data());
  }
}

}  // namespace heavywater
