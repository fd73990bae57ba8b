// The blocks in which files store quantised weights, as groups of 16 values that
// have one scale and one minimum: what every such type comes down to.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

#include "worker/model/gguf_types.h"

namespace heavywater {

inline constexpr int64_t kQuantGroup = 16;

// Value i = codes[i] * scale + minimum, in float32 and rounded once: the product of
// a code and a scale is exact wherever there is a minimum.
struct QuantGroup {
  float scale = 0;
  float minimum = 0;
  std::array<int8_t, kQuantGroup> codes = {};
};

// The groups of whole blocks of a type whose blocks have scales (Q4_0, Q4_1, Q5_0, Q5_1, Q8_0,
// Q4_K, Q5_K, Q6_K), in order; as many as `groups` holds.
void ReadQuantGroups(TensorType type, const std::byte* blocks, std::span<QuantGroup> groups);

}  // namespace heavywater
