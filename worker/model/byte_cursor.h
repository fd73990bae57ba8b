// Reads little-endian values from bytes that may be truncated or hostile.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>

#include "absl/status/statusor.h"

namespace heavywater {

static_assert(std::endian::native == std::endian::little, "GGUF is read in place");

// Every read names what it reads; DATA_LOSS with that name when the bytes end
// before it does.
class ByteCursor {
 public:
  explicit ByteCursor(std::span<const std::byte> bytes) : bytes_(bytes) {}

  size_t offset() const { return offset_; }
  size_t remaining() const { return bytes_.size() - offset_; }

  // The next `count` bytes.
  absl::StatusOr<std::span<const std::byte>> Take(uint64_t count, std::string_view what);

  template <typename T>
  absl::StatusOr<T> Read(std::string_view what) {
    auto bytes = Take(sizeof(T), what);
    if (!bytes.ok()) return bytes.status();
    T value;
    std::memcpy(&value, bytes->data(), sizeof(T));
    return value;
  }

  // A 64-bit length, then so many bytes. RESOURCE_EXHAUSTED above `max_bytes`.
  absl::StatusOr<std::string_view> ReadString(uint64_t max_bytes, std::string_view what);

 private:
  std::span<const std::byte> bytes_;
  size_t offset_ = 0;
};

}  // namespace heavywater
