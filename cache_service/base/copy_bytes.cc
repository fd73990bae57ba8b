#include "cache_service/base/copy_bytes.h"

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace heavywater {
namespace {

constexpr size_t kSmallBytes = 2048;  // no C library takes `rep movsb` for fewer
constexpr size_t kLineBytes = 64;
constexpr size_t kStepBytes = 3 * kLineBytes;
constexpr size_t kAheadBytes = 16 * kStepBytes;  // prefetchers stop at the end of their 4 KiB

// How many bytes from `to` on lie before its next line.
size_t BytesToNextLine(const std::byte* to) {
  return -reinterpret_cast<uintptr_t>(to) % kLineBytes;
}

#if defined(__x86_64__)
constexpr bool kStoresLines = true;

// Three lines; `to` is the beginning of one.
void StoreThreeLines(const std::byte* from, std::byte* to) {
  for (size_t i = 0; i < 3 * kLineBytes; i += sizeof(__m128i)) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), bytes);
  }
}
// Before others are told of what has been stored.
void FinishStores() { _mm_sfence(); }
#else
constexpr bool kStoresLines = false;
void StoreThreeLines(const std::byte* from, std::byte* to) {
  std::memcpy(to, from, 3 * kLineBytes);
}
void FinishStores() {}
#endif

}  // namespace

void CopyBytes(std::span<const std::byte> from, std::byte* to) {
  if (from.size() <= kSmallBytes) {
    if (!from.empty()) std::memcpy(to, from.data(), from.size());
    return;
  }
  const std::byte* source = from.data();
  size_t left = from.size();
  for (; left >= kStepBytes; left -= kStepBytes, source += kStepBytes, to += kStepBytes) {
    for (size_t i = 0; i < kStepBytes; i += kLineBytes) {
      __builtin_prefetch(source + kAheadBytes + i);
    }
    std::memcpy(to, source, kStepBytes);
  }
  // The last step overlaps the one before.
  if (left > 0) std::memcpy(to + left - kStepBytes, source + left - kStepBytes, kStepBytes);
}

void StoreBytes(std::span<const std::byte> from, std::byte* to) {
  if (!kStoresLines || from.size() <= kSmallBytes) {
    CopyBytes(from, to);
    return;
  }
  const size_t head = BytesToNextLine(to);
  std::memcpy(to, from.data(), head);
  const std::byte* source = from.data() + head;
  to += head;
  size_t left = from.size() - head;
  for (; left >= kStepBytes; left -= kStepBytes, source += kStepBytes, to += kStepBytes) {
    for (size_t i = 0; i < kStepBytes; i += kLineBytes) {
      __builtin_prefetch(source + kAheadBytes + i);
    }
    StoreThreeLines(source, to);
  }
  std::memcpy(to, source, left);
  FinishStores();
}

}  // namespace heavywater
