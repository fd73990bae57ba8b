// ggml's "k-quants": blocks of 256 values whose parts have quantised scales of their
// own. `count` is a multiple of 256; `from` holds that many values' blocks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace heavywater {

inline constexpr int kSuperBlock = 256;

// 144 bytes a block: two halves (scale, scale of minima), eight 6-bit scales and
// minima in 12 bytes, 128 bytes of nibbles. Value = scale * quant - minimum.
void DequantizeQ4K(const std::byte* from, int64_t count, float* to);

// 176 bytes: as Q4_K, with 32 bytes of fifth bits before the nibbles.
void DequantizeQ5K(const std::byte* from, int64_t count, float* to);

// 210 bytes: 128 of nibbles, 64 of two upper bits each, sixteen signed 8-bit scales, a
// half. Value = half * scale * (quant - 32).
void DequantizeQ6K(const std::byte* from, int64_t count, float* to);

}  // namespace heavywater
