#include "cache_service/base/copy_bytes.h"

#include <cstring>

namespace heavywater {
namespace {

constexpr size_t kLineBytes = 64;
constexpr size_t kStepBytes = 3 * kLineBytes;
constexpr size_t kAheadBytes = 16 * kStepBytes;  // prefetchers stop at the end of their 4 KiB

}  // namespace

void CopyBytes(std::span<const std::byte> from, std::byte* to) {
  const std::byte* source = from.data();
  size_t left = from.size();
  for (; left >= kStepBytes; left -= kStepBytes, source += kStepBytes, to += kStepBytes) {
    for (size_t i = 0; i < kStepBytes; i += kLineBytes) {
      __builtin_prefetch(source + kAheadBytes + i);
    }
    std::memcpy(to, source, kStepBytes);
  }
  if (left > 0) std::memcpy(to, source, left);
}

}  // namespace heavywater
