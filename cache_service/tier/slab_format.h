// The bytes at the front of a slab, as every process that maps it sees them.
#pragma once

#include <atomic>
#include <cstdint>

namespace heavywater {

inline constexpr int32_t kSlabFormatVersion = 2;
inline constexpr uint64_t kSlabMagic = 0x42414c5357485648;  // "HVHWSLAB", little endian

// Pages are whole units, so that a unit belongs to one page and one sequence.
inline constexpr int64_t kSlabUnitBytes = 4096;

// Watermark cells do not share cache lines: each has one writer.
inline constexpr int64_t kWatermarkCellBytes = 64;
inline constexpr int kWatermarksPerUnit = kSlabUnitBytes / kWatermarkCellBytes;

// Written by the owner, but for the last two fields before the name is told to anyone.
struct SlabHeader {
  uint64_t magic;
  int32_t format_version;
  int32_t header_bytes;
  int64_t total_bytes;                  // of the whole object, this header included
  uint64_t nonce;                       // random: tells this slab from another of the same name
  int64_t kept;                         // not 0: outlives its owner, which comes back to it
  int64_t committed_bytes;              // taken from the system so far
  std::atomic<uint64_t> state_changes;  // of the owner's state: one that lacks some is old
};
static_assert(sizeof(SlabHeader) <= kSlabUnitBytes);

}  // namespace heavywater
