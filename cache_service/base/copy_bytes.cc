#include "cache_service/base/copy_bytes.h"

#include <cstring>

#include "cache_service/base/store_lines.h"

namespace heavywater {
namespace {

constexpr size_t kSmallBytes = 2048;  // no C library takes `rep movsb` for fewer
constexpr size_t kStepBytes = 3 * kLineBytes;
constexpr size_t kAheadBytes = 16 * kStepBytes;  // prefetchers stop at the end of their 4 KiB

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
