#include "cache_service/base/crc32c.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "cache_service/base/copy_bytes.h"

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
constexpr size_t kBlockBytes = 512;

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

constexpr size_t kGroupBytes = 3 * kBlockBytes;
constexpr size_t kLineBytes = 64;
constexpr size_t kSmallBytes = 4096;  // a copy, then its checksum
static_assert(kSmallBytes >= 2 * kGroupBytes);

// The group at `data`. The three blocks are three places of memory, which its prefetcher
// follows badly: two groups on it is asked for in order. With kCopies the group after this one
// is copied meanwhile, from `next` to behind this one.
template <bool kCopies>
__attribute__((target("sse4.2"), always_inline)) inline uint64_t ExtendByGroup(
    uint64_t crc, std::conditional_t<kCopies, std::byte, const std::byte>* data,
    const std::byte* next) {
  uint64_t second = 0;
  uint64_t third = 0;
  for (size_t line = 0; line < kBlockBytes; line += kLineBytes) {
    for (size_t i = 3 * line; i < 3 * (line + kLineBytes); i += kLineBytes) {
      __builtin_prefetch(next + kGroupBytes + i);
    }
    if constexpr (kCopies) {
      for (size_t i = 3 * line; i < 3 * (line + kLineBytes); i += kLineBytes) {
        __builtin_prefetch(data + 2 * kGroupBytes + i, /*write=*/1);
      }
      std::memcpy(data + kGroupBytes + 3 * line, next + 3 * line, 3 * kLineBytes);
    }
    for (size_t i = line; i < line + kLineBytes; i += 8) {
      crc = _mm_crc32_u64(crc, WordAt(data + i));
      second = _mm_crc32_u64(second, WordAt(data + kBlockBytes + i));
      third = _mm_crc32_u64(third, WordAt(data + 2 * kBlockBytes + i));
    }
  }
  return SkipBlock(SkipBlock(crc) ^ second) ^ third;
}

// The first groups' worth, which nobody has asked for yet.
__attribute__((always_inline)) inline void PrefetchHead(const std::byte* data, size_t size) {
  const size_t head = std::min(size, 2 * kGroupBytes);
  for (size_t i = 0; i < head; i += kLineBytes) __builtin_prefetch(data + i);
}

__attribute__((target("sse4.2"))) uint32_t ExtendTailSse42(uint64_t crc, const std::byte* data,
                                                           size_t size) {
  for (; size >= 8; data += 8, size -= 8) crc = _mm_crc32_u64(crc, WordAt(data));
  return ExtendPortable(static_cast<uint32_t>(crc), data, size);
}

__attribute__((target("sse4.2"))) uint32_t ExtendSse42(uint32_t crc, const std::byte* data,
                                                       size_t size) {
  uint64_t wide = crc;
  PrefetchHead(data, size);
  for (; size >= kGroupBytes; data += kGroupBytes, size -= kGroupBytes) {
    wide = ExtendByGroup<false>(wide, data, data + kGroupBytes);
  }
  return ExtendTailSse42(wide, data, size);
}

// Copies one group ahead of the checksum, which is that of the copy.
__attribute__((target("sse4.2"))) uint32_t CopySse42(std::byte* to, const std::byte* from,
                                                     size_t size, uint32_t crc) {
  if (size < kSmallBytes) {
    CopyBytes({from, size}, to);
    return ExtendSse42(crc, to, size);
  }
  uint64_t wide = crc;
  PrefetchHead(from, size);
  CopyBytes({from, kGroupBytes}, to);
  for (; size >= 2 * kGroupBytes; to += kGroupBytes, from += kGroupBytes, size -= kGroupBytes) {
    wide = ExtendByGroup<true>(wide, to, from + kGroupBytes);
  }
  CopyBytes({from + kGroupBytes, size - kGroupBytes}, to + kGroupBytes);
  return ExtendSse42(static_cast<uint32_t>(wide), to, size);
}

bool HasSse42() {
  static const bool has = __builtin_cpu_supports("sse4.2");
  return has;
}
#endif

}  // namespace

uint32_t Crc32c(std::span<const std::byte> bytes, uint32_t crc) {
#if defined(__x86_64__)
  if (HasSse42()) return ~ExtendSse42(~crc, bytes.data(), bytes.size());
#endif
  return ~ExtendPortable(~crc, bytes.data(), bytes.size());
}

uint32_t CopyWithCrc32c(std::span<const std::byte> from, std::byte* to, uint32_t crc) {
  if (from.empty()) return crc;
#if defined(__x86_64__)
  if (HasSse42()) return ~CopySse42(to, from.data(), from.size(), ~crc);
#endif
  CopyBytes(from, to);
  return ~ExtendPortable(~crc, to, from.size());
}

}  // namespace heavywater
