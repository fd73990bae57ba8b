// Which demoted positions were read most, as a response says it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "heavywater/v1/generation.pb.h"

namespace heavywater {

inline constexpr size_t kMaxPositionReads = 256;  // in one response

// The kMaxPositionReads positions with the most reads (more than 0), in that order,
// ties to the lower position. `reads`: by position.
void FillReads(std::span<const int64_t> reads,
               google::protobuf::RepeatedPtrField<v1::PositionReads>& to);

}  // namespace heavywater
