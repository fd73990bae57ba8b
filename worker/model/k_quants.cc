#include "worker/model/k_quants.h"

#include <cstring>

#include "worker/model/dequantize.h"

namespace heavywater {
namespace {

constexpr int kPart = 32;  // values of Q4_K and Q5_K under one scale
constexpr int kParts = kSuperBlock / kPart;
constexpr int kHeaderBytes = 16;  // two halves, then the packed scales

float LoadHalf(const std::byte* from) {
  uint16_t half;
  std::memcpy(&half, from, sizeof(half));
  return HalfToFloat(half);
}

const uint8_t* Bytes(const std::byte* from) { return reinterpret_cast<const uint8_t*>(from); }

// Scale and minimum of one part of a block of Q4_K or Q5_K, of which `packed` are the 12
// bytes: six bits each, those of the last four parts spread over what the first left free.
struct Part {
  Part(const std::byte* block, int index) {
    const uint8_t* const packed = Bytes(block + 4);
    int scale_bits = packed[index % 4] & 63;
    int minimum_bits = packed[index % 4 + 4] & 63;
    if (index >= 4) {
      scale_bits = (packed[index + 4] & 0x0f) | (packed[index - 4] >> 6) << 4;
      minimum_bits = packed[index + 4] >> 4 | (packed[index] >> 6) << 4;
    }
    scale = LoadHalf(block) * static_cast<float>(scale_bits);
    minimum = LoadHalf(block + 2) * static_cast<float>(minimum_bits);
  }
  float scale;
  float minimum;
};

// Two parts share 32 bytes of nibbles. fifth(part, i): bit 4 of a part's value.
template <class Fifth>
void DequantizeParts(const std::byte* block, const std::byte* nibbles, const Fifth& fifth,
                     float* to) {
  for (int index = 0; index < kParts; ++index) {
    const Part part(block, index);
    const uint8_t* const quants = Bytes(nibbles) + index / 2 * kPart;
    const int shift = index % 2 * 4;
    for (int i = 0; i < kPart; ++i) {
      const int quant = ((quants[i] >> shift) & 0x0f) | fifth(index, i);
      *to++ = part.scale * static_cast<float>(quant) - part.minimum;
    }
  }
}

// 128 values of Q6_K: 64 bytes of nibbles, 32 of upper bits, 8 scales.
void DequantizeHalfOfQ6K(const uint8_t* nibbles, const uint8_t* upper, const int8_t* scales,
                         float scale, float* to) {
  for (int quarter = 0; quarter < 4; ++quarter) {
    for (int i = 0; i < kPart; ++i) {
      const int low = (nibbles[quarter % 2 * kPart + i] >> (quarter / 2 * 4)) & 0x0f;
      const int quant = (low | ((upper[i] >> (2 * quarter)) & 3) << 4) - 32;
      const float of_sixteen = scale * static_cast<float>(scales[2 * quarter + i / 16]);
      *to++ = of_sixteen * static_cast<float>(quant);
    }
  }
}

}  // namespace

void DequantizeQ4K(const std::byte* from, int64_t count, float* to) {
  constexpr int kBytes = kHeaderBytes + kSuperBlock / 2;
  for (int64_t i = 0; i < count; i += kSuperBlock, from += kBytes, to += kSuperBlock) {
    DequantizeParts(
        from, from + kHeaderBytes, [](int, int) { return 0; }, to);
  }
}

void DequantizeQ5K(const std::byte* from, int64_t count, float* to) {
  constexpr int kFifthBytes = kSuperBlock / 8;
  constexpr int kBytes = kHeaderBytes + kFifthBytes + kSuperBlock / 2;
  for (int64_t i = 0; i < count; i += kSuperBlock, from += kBytes, to += kSuperBlock) {
    const uint8_t* const fifths = Bytes(from + kHeaderBytes);
    const auto fifth = [&](int part, int at) { return ((fifths[at] >> part) & 1) << 4; };
    DequantizeParts(from, from + kHeaderBytes + kFifthBytes, fifth, to);
  }
}

void DequantizeQ6K(const std::byte* from, int64_t count, float* to) {
  constexpr int kNibbleBytes = kSuperBlock / 2;
  constexpr int kUpperBytes = kSuperBlock / 4;
  constexpr int kScales = kSuperBlock / 16;
  constexpr int kBytes = kNibbleBytes + kUpperBytes + kScales + 2;
  for (int64_t i = 0; i < count; i += kSuperBlock, from += kBytes, to += kSuperBlock) {
    const std::byte* const upper = from + kNibbleBytes;
    const std::byte* const scales = upper + kUpperBytes;
    const float scale = LoadHalf(scales + kScales);
    for (int half = 0; half < 2; ++half) {
      DequantizeHalfOfQ6K(Bytes(from) + half * kNibbleBytes / 2, Bytes(upper) + half * kPart,
                          reinterpret_cast<const int8_t*>(scales) + half * kScales / 2, scale,
                          to + half * kSuperBlock / 2);
    }
  }
}

}  // namespace heavywater
