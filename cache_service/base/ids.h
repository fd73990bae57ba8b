// Identifiers that cross every layer. Plain integers with a name each.
#pragma once

#include <cstdint>

namespace heavywater {

using SequenceId = uint64_t;     // given by the cache service, never reused; 0 = none
using Position = int32_t;        // a token's place in the text, from 0, never renumbered
using Epoch = uint64_t;          // number of a group's current formation, from 1
using FingerprintId = uint64_t;  // short name of a layout fingerprint

// Sequences of values by key have the highest bit set, those that clients see never do.
inline constexpr SequenceId kBlobSequenceBit = SequenceId{1} << 63;
inline constexpr bool IsValue(SequenceId id) { return (id & kBlobSequenceBit) != 0; }

inline constexpr Position kNoPosition = -1;  // a free slot

}  // namespace heavywater
