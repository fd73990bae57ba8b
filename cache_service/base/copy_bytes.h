// Copies of pages that lie in no cache.
#pragma once

#include <cstddef>
#include <span>

namespace heavywater {

// As memcpy, at the bandwidth of memory for any size and alignment: the C library's takes
// `rep movsb` for more than a few KiB, and with it some processors (Zen 3) five times as long
// where target and source lie at almost the same place of their 4 KiB, as pages and what was
// allocated for one do. The ranges must not overlap.
void CopyBytes(std::span<const std::byte> from, std::byte* to);

}  // namespace heavywater
