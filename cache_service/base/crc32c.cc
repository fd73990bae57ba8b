#include "cache_service/base/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace heavywater {
namespace {

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78u : 0u);
    table[i] = crc;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = MakeTable();

uint32_t ExtendPortable(uint32_t crc, const std::byte* data, size_t size) {
  for (size_t i = 0; i < size; ++i) {
    crc = kTable[(crc ^ static_cast<uint8_t>(data[i])) & 0xff] ^ (crc >> 8);
  }
  return crc;
}

#if defined(__x86_64__)
// The instruction takes one word a cycle, and its result three: three blocks side by
// side keep it busy. Their registers are joined as if one had followed the other.
constexpr size_t kBlockBytes = 1024;

// What kBlockBytes zero bytes make of a register, by byte of the register: the map is
// linear.
constexpr std::array<std::array<uint32_t, 256>, 4> MakeSkipTable() {
  std::array<uint32_t, 32> of_bit{};
  for (int bit = 0; bit < 32; ++bit) {
    uint32_t crc = uint32_t{1} << bit;
    for (size_t i = 0; i < kBlockBytes; ++i) crc = kTable[crc & 0xff] ^ (crc >> 8);
    of_bit[bit] = crc;
  }
  std::array<std::array<uint32_t, 256>, 4> table{};
  for (int byte = 0; byte < 4; ++byte) {
    for (uint32_t value = 0; value < 256; ++value) {
      for (int bit = 0; bit < 8; ++bit) {
        if (value >> bit & 1) table[byte][value] ^= of_bit[8 * byte + bit];
      }
    }
  }
  return table;
}

constexpr std::array<std::array<uint32_t, 256>, 4> kSkipTable = MakeSkipTable();

uint32_t SkipBlock(uint64_t crc) {
  return kSkipTable[0][crc & 0xff] ^ kSkipTable[1][crc >> 8 & 0xff] ^
         kSkipTable[2][crc >> 16 & 0xff] ^ kSkipTable[3][crc >> 24 & 0xff];
}

uint64_t WordAt(const std::byte* data) {
  uint64_t word;
  std::memcpy(&word, data, sizeof(word));
  return word;
}

__attribute__((target("sse4.2"))) uint32_t ExtendSse42(uint32_t crc, const std::byte* data,
                                                       size_t size) {
  uint64_t wide = crc;
  for (; size >= 3 * kBlockBytes; data += 3 * kBlockBytes, size -= 3 * kBlockBytes) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < kBlockBytes; i += 8) {
      wide = _mm_crc32_u64(wide, WordAt(data + i));
      second = _mm_crc32_u64(second, WordAt(data + kBlockBytes + i));
      third = _mm_crc32_u64(third, WordAt(data + 2 * kBlockBytes + i));
    }
    wide = SkipBlock(SkipBlock(wide) ^ second) ^ third;
  }
  for (; size >= 8; data += 8, size -= 8) wide = _mm_crc32_u64(wide, WordAt(data));
  return ExtendPortable(static_cast<uint32_t>(wide), data, size);
}
#endif

}  // namespace

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t crc) {
  crc = ~crc;
#if defined(__x86_64__)
  static const bool has_sse42 = __builtin_cpu_supports("sse4.2");
  if (has_sse42) return ~ExtendSse42(crc, bytes.data(), bytes.size());
#endif
  return ~ExtendPortable(crc, bytes.data(), bytes.size());
}

}  // namespace heavywater
