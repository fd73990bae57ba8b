// The header of a GGUF file: metadata, and the table of tensors.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "worker/model/gguf_types.h"

namespace heavywater {

struct GgufContents {
  absl::flat_hash_map<std::string_view, GgufValue> metadata;
  absl::flat_hash_map<std::string_view, GgufTensor> tensors;
  int64_t header_bytes = 0;  // metadata and tensor table
};

// Parses a whole file. Everything that the result holds is a view into `file`
// and lies inside it. Never trusts a count, length, offset or type: DATA_LOSS
// when the file ends early, RESOURCE_EXHAUSTED when a count exceeds its limit,
// UNIMPLEMENTED for a version or tensor type that is not supported,
// INVALID_ARGUMENT for the rest; each names the field or tensor.
absl::StatusOr<GgufContents> ParseGguf(std::span<const std::byte> file);

}  // namespace heavywater
