// Pages of keys and values at 8 bits, for the tiers below host memory: each channel of K
// over the page, and each token's V, has a minimum and a step of its own. (The axes are those
// of KIVI, Liu et al. 2024: K has channels that stand out, V has none.)
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "cache_service/tier/page_geometry.h"

namespace heavywater {

// Of the numbers in a page's rows. Opaque bytes are never coded.
enum class PageDtype : uint8_t { kOpaque = 0, kBf16 = 1, kFp16 = 2, kFp32 = 3 };
PageDtype PageDtypeOf(absl::string_view name);  // "bf16", "fp16", "fp32"

// Bytes of the coded page: its own when they are opaque, or no fewer than that. A row is
// [channels] of K, then [channels] of V.
int64_t CodedBytes(const PageGeometry& geometry, PageDtype dtype);
inline bool IsCoded(const PageGeometry& geometry, PageDtype dtype) {
  return CodedBytes(geometry, dtype) < geometry.page_bytes();
}

// Into exactly CodedBytes(). What DecodePage() makes of it differs from each number by at most
// half a step (a 255th of its channel's or token's range), plus the rounding of its type; a
// channel or token of equal numbers comes back as it was, and nothing leaves the range.
// INVALID_ARGUMENT naming row and channel: a NaN or an infinity.
absl::Status EncodePage(const PageGeometry& geometry, PageDtype dtype,
                        std::span<const std::byte> page, std::span<std::byte> coded);
// Into exactly page_bytes(). INVALID_ARGUMENT: sizes do not fit. Any coded bytes give finite
// numbers or are DATA_LOSS.
absl::Status DecodePage(const PageGeometry& geometry, PageDtype dtype,
                        std::span<const std::byte> coded, std::span<std::byte> page);

}  // namespace heavywater
