// The bytes at the front of a slab, as every process that maps it sees them.
#pragma once

#include <cstdint>

namespace heavywater {

inline constexpr int32_t kSlabFormatVersion = 1;
inline constexpr uint64_t kSlabMagic = 0x42414c5357485648;  // "HVHWSLAB", little endian

// Pages are whole units, so that a unit belongs to one page and one sequence.
inline constexpr int64_t kSlabUnitBytes = 4096;

// Watermark cells do not share cache lines: each has one writer.
inline constexpr int64_t kWatermarkCellBytes = 64;
inline constexpr int kWatermarksPerUnit = kSlabUnitBytes / kWatermarkCellBytes;

// Written once by the owner, before the name is told to anyone.
struct SlabHeader {
  uint64_t magic;
  int32_t format_version;
  int32_t header_bytes;
  int64_t total_bytes;  // of the whole object, this header included
  uint64_t nonce;       // random: tells this slab from another of the same name
};
static_assert(sizeof(SlabHeader) <= kSlabUnitBytes);

}  // namespace heavywater
