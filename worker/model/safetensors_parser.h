// One safetensors file: a length, a JSON header of so many bytes, then the tensors.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/model/gguf_types.h"

namespace heavywater {

struct SafetensorsContents {
  // Sorted by name; names are views of `names`, data of the file. Two dimensions at most:
  // [rows][row_elements], a vector is one row.
  std::vector<GgufTensor> tensors;
  std::vector<std::unique_ptr<const std::string>> names;
  int64_t header_bytes = 0;  // with its length
};

// Parses a whole file; never trusts it. DATA_LOSS when it ends early, RESOURCE_EXHAUSTED
// for a header of more than 64 MiB or more than 65,536 tensors, UNIMPLEMENTED for a type
// other than F32, F16 and BF16 or more than two dimensions, INVALID_ARGUMENT for the rest:
// a header that is no JSON, offsets that overlap, leave a gap or do not fit the shape. Each
// names the tensor.
absl::StatusOr<SafetensorsContents> ParseSafetensors(std::span<const std::byte> file);

}  // namespace heavywater
