#include "worker/model/quant_groups.h"

#include <cstring>

#include "cache_service/base/check.h"
#include "worker/model/dequantize.h"

namespace heavywater {
namespace {

constexpr int kPerBlock = 2;  // groups in a block of 32 values
constexpr int kPart = 32;     // values of a k-quant's block of 256 that lie together

float LoadHalf(const std::byte* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  return HalfToFloat(half);
}

const uint8_t* Bytes(const std::byte* from) { return reinterpret_cast<const uint8_t*>(from); }

// The 16 bytes of nibbles of a block of 32: the low ones are its first 16 values,
// the high ones the others.
int Nibble(const std::byte* nibbles, int value) {
  const int pair = Bytes(nibbles)[value % kQuantGroup];
  return value < kQuantGroup ? pair & 0x0f : pair >> 4;
}

// Bit `value` of 32, as bit 4.
int FifthBit(const std::byte* bits, int value) {
  return (Bytes(bits)[value / 8] >> (value % 8) & 1) << 4;
}

// Sets both groups of a block of 32; code(i) gives value i's.
template <class Code>
void SetBlock(float scale, float minimum, const Code& code, QuantGroup* groups) {
  for (int g = 0; g < kPerBlock; ++g) {
    groups[g].scale = scale;
    groups[g].minimum = minimum;
    for (int i = 0; i < kQuantGroup; ++i) {
      groups[g].codes[static_cast<size_t>(i)] =
          static_cast<int8_t>(code(g * static_cast<int>(kQuantGroup) + i));
    }
  }
}

// A scale, then 32 signed bytes.
void ReadQ8_0(const std::byte* block, QuantGroup* groups) {
  const auto* codes = reinterpret_cast<const int8_t*>(block + 2);
  SetBlock(
      LoadHalf(block), 0, [=](int i) { return codes[i]; }, groups);
}

// A scale, then nibbles around 8.
void ReadQ4_0(const std::byte* block, QuantGroup* groups) {
  const float scale = LoadHalf(block);
  SetBlock(
      scale, -8 * scale, [=](int i) { return Nibble(block + 2, i); }, groups);
}

// A scale and a minimum, then nibbles.
void ReadQ4_1(const std::byte* block, QuantGroup* groups) {
  SetBlock(
      LoadHalf(block), LoadHalf(block + 2), [=](int i) { return Nibble(block + 4, i); }, groups);
}

// A scale, the fifth bits, nibbles; around 16.
void ReadQ5_0(const std::byte* block, QuantGroup* groups) {
  const auto code = [=](int i) { return (Nibble(block + 6, i) | FifthBit(block + 2, i)) - 16; };
  SetBlock(LoadHalf(block), 0, code, groups);
}

// A scale and a minimum, the fifth bits, nibbles.
void ReadQ5_1(const std::byte* block, QuantGroup* groups) {
  const auto code = [=](int i) { return Nibble(block + 8, i) | FifthBit(block + 4, i); };
  SetBlock(LoadHalf(block), LoadHalf(block + 2), code, groups);
}

// Scale and minimum of one part of a block of Q4_K or Q5_K: two halves, then 12 bytes
// of six bits each, those of the last four parts spread over what the first left free.
struct PartScale {
  PartScale(const std::byte* block, int part) {
    const uint8_t* const packed = Bytes(block + 4);
    int scale_bits = packed[part % 4] & 63;
    int minimum_bits = packed[part % 4 + 4] & 63;
    if (part >= 4) {
      scale_bits = (packed[part + 4] & 0x0f) | (packed[part - 4] >> 6) << 4;
      minimum_bits = packed[part + 4] >> 4 | (packed[part] >> 6) << 4;
    }
    scale = LoadHalf(block) * static_cast<float>(scale_bits);
    minimum = -LoadHalf(block + 2) * static_cast<float>(minimum_bits);
  }
  float scale;
  float minimum;
};

// Eight parts, of which two share 32 bytes of nibbles.
int PartNibble(const std::byte* nibbles, int part, int value) {
  return Bytes(nibbles)[part / 2 * kPart + value] >> (part % 2 * 4) & 0x0f;
}

void ReadQ4K(const std::byte* block, QuantGroup* groups) {
  for (int part = 0; part < 8; ++part) {
    const PartScale of(block, part);
    const auto code = [&](int i) { return PartNibble(block + 16, part, i); };
    SetBlock(of.scale, of.minimum, code, groups + part * kPerBlock);
  }
}

// 32 bytes of fifth bits before the nibbles, a bit a part.
void ReadQ5K(const std::byte* block, QuantGroup* groups) {
  for (int part = 0; part < 8; ++part) {
    const PartScale of(block, part);
    const auto code = [&](int i) {
      return PartNibble(block + 48, part, i) | (Bytes(block + 16)[i] >> part & 1) << 4;
    };
    SetBlock(of.scale, of.minimum, code, groups + part * kPerBlock);
  }
}

// 128 bytes of nibbles, 64 of two upper bits each, sixteen signed scales, a half.
// Each half of the block has four parts; the nibbles of parts 0 and 2 share bytes, so
// do those of 1 and 3, and the upper bits of all four.
void ReadQ6K(const std::byte* block, QuantGroup* groups) {
  const auto* scales = reinterpret_cast<const int8_t*>(block + 192);
  const float scale = LoadHalf(block + 208);
  for (int part = 0; part < 8; ++part) {
    const int quarter = part % 4;
    const uint8_t* const nibbles = Bytes(block) + part / 4 * 64 + quarter % 2 * kPart;
    const uint8_t* const upper = Bytes(block) + 128 + part / 4 * kPart;
    const auto code = [&](int i) {
      const int low = nibbles[i] >> (quarter / 2 * 4) & 0x0f;
      return (low | (upper[i] >> (2 * quarter) & 3) << 4) - 32;
    };
    QuantGroup* const of_part = groups + part * kPerBlock;
    SetBlock(0, 0, code, of_part);
    for (int g = 0; g < kPerBlock; ++g) {
      of_part[g].scale = scale * static_cast<float>(scales[part * kPerBlock + g]);
    }
  }
}

using Reader = void (*)(const std::byte* block, QuantGroup* groups);

Reader ReaderOf(TensorType type) {
  switch (type) {
    case TensorType::kQ8_0:
      return ReadQ8_0;
    case TensorType::kQ4_0:
      return ReadQ4_0;
    case TensorType::kQ4_1:
      return ReadQ4_1;
    case TensorType::kQ5_0:
      return ReadQ5_0;
    case TensorType::kQ5_1:
      return ReadQ5_1;
    case TensorType::kQ4_K:
      return ReadQ4K;
    case TensorType::kQ5_K:
      return ReadQ5K;
    case TensorType::kQ6_K:
      return ReadQ6K;
    case TensorType::kF32:
    case TensorType::kF16:
    case TensorType::kBF16:
      return nullptr;
  }
  return nullptr;
}

}  // namespace

void ReadQuantGroups(TensorType type, const std::byte* blocks, std::span<QuantGroup> groups) {
  const Reader read = ReaderOf(type);
  HW_CHECK(read != nullptr);
  const TensorBlock block = TensorBlockOf(type).value();
  const auto per_block = static_cast<size_t>(block.elements / kQuantGroup);
  HW_CHECK(groups.size() % per_block == 0);
  for (size_t at = 0; at < groups.size(); at += per_block, blocks += block.bytes) {
    read(blocks, &groups[at]);
  }
}

}  // namespace heavywater
