#include "cache_service/tier/page_geometry.h"

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

absl::Status Positive(const char* field, int64_t value, int64_t max) {
  if (value >= 1 && value <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, ", want 1 to ", max));
}

}  // namespace

absl::Status PageGeometry::Validate() const {
  for (absl::Status status :
       {Positive("num_layers", num_layers, 1024), Positive("num_kv_heads", num_kv_heads, 1024),
        Positive("page_tokens", page_tokens, 65536), Positive("row_bytes", row_bytes, 65536)}) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace heavywater
