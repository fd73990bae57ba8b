// How a sealed page is written below host memory: the bytes of its key, and a header
// in front of its own bytes. The same in every lower tier.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/tier/lower_tier.h"

namespace heavywater {

// Of the key bytes and the header together; a tier refuses another's.
inline constexpr int32_t kStoredPageVersion = 1;
inline constexpr int64_t kStoredKeyBytes = 28;
inline constexpr int64_t kStoredHeaderBytes = 24;

// What a page takes in a lower tier.
inline constexpr int64_t StoredBytes(int64_t page_bytes) {
  return page_bytes + kStoredKeyBytes + kStoredHeaderBytes;
}

// INVALID_ARGUMENT naming the field.
absl::Status CheckPageKey(const PageKey& key);

// Big endian, so that keys sort by sequence, layer, KV head and page.
std::string StoredKey(const PageKey& key);

using StoredHeader = std::array<std::byte, kStoredHeaderBytes>;
StoredHeader MakeStoredHeader(const PageCopy& page);

// Copies the page out of a stored value and checks it: its CRC32C. DATA_LOSS saying
// what differs.
absl::StatusOr<uint32_t> TakeStoredPage(const PageKey& key, std::span<const std::byte> stored,
                                        std::span<std::byte> bytes);

}  // namespace heavywater
