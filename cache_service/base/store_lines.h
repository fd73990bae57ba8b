// Stores past the caches, for copy_bytes.cc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace heavywater {

inline constexpr size_t kLineBytes = 64;

// How many bytes from `to` on lie before its next line.
inline size_t BytesToNextLine(const std::byte* to) {
  return -reinterpret_cast<uintptr_t>(to) % kLineBytes;
}

#if defined(__x86_64__)
inline constexpr bool kStoresLines = true;

// Three lines; `to` is the beginning of one.
inline void StoreThreeLines(const std::byte* from, std::byte* to) {
  for (size_t i = 0; i < 3 * kLineBytes; i += sizeof(__m128i)) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), bytes);
  }
}
// Before others are told of what has been stored.
inline void FinishStores() { _mm_sfence(); }
#else
inline constexpr bool kStoresLines = false;
inline void StoreThreeLines(const std::byte* from, std::byte* to) {
  std::memcpy(to, from, 3 * kLineBytes);
}
inline void FinishStores() {}
#endif

}  // namespace heavywater
