#include "worker/cache/sketch_shape.h"

#include "absl/strings/str_cat.h"

namespace heavywater {

absl::Status SketchShape::Validate() const {
  if (channels < 8 || channels % 8 != 0 || channels > head_dim) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sketch_channels is ", channels, ", want a multiple of 8 up to the head size, ", head_dim));
  }
  if (head_dim > 256) {
    return absl::InvalidArgumentError(
        absl::StrCat("head_dim is ", head_dim, ", want at most 256 for recall"));
  }
  if (page_tokens < kSketchBlock || page_tokens % kSketchBlock != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "page_tokens is ", page_tokens, ", want a multiple of ", kSketchBlock, " for recall"));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
