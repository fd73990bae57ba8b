// Copies of pages that lie in no cache.
#pragma once

#include <cstddef>
#include <span>

namespace heavywater {

// As memcpy, which it is for small ones; of pages at the bandwidth of memory wherever they lie:
// the C library's takes `rep movsb` from some KiB on, and with it some processors (Zen 3) several
// times as long where the target begins a few bytes further into its 4 KiB than the source, as
// large allocations (16 bytes into a page) do beside pages. The ranges must not overlap.
void CopyBytes(std::span<const std::byte> from, std::byte* to);

// As CopyBytes(), past the caches (on x86): into memory that is not read soon, which then need not
// be fetched in order to be written.
void StoreBytes(std::span<const std::byte> from, std::byte* to);

}  // namespace heavywater
