#include "worker/cache/kv_layout.h"

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

absl::Status CheckPositive(const char* field, int got) {
  if (got > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", got, ", want at least 1"));
}

absl::Status CheckDivides(const char* small_name, int small, const char* large_name, int large) {
  if (large % small == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(large_name, " is ", large, ", want a multiple of ", small_name, ", ", small));
}

}  // namespace

std::string_view KvDtypeName(KvDtype dtype) {
  if (dtype == KvDtype::kFloat32) return "fp32";
  return dtype == KvDtype::kBFloat16 ? "bf16" : "fp16";
}

absl::StatusOr<KvDtype> ParseKvDtype(std::string_view name) {
  if (name == "fp32") return KvDtype::kFloat32;
  if (name == "bf16") return KvDtype::kBFloat16;
  if (name == "fp16") return KvDtype::kFloat16;
  return absl::InvalidArgumentError(
      absl::StrCat("kv_dtype is \"", std::string(name), "\", want one of: fp32, bf16, fp16"));
}

absl::Status KvShape::Validate() const {
  HW_RETURN_IF_ERROR(CheckPositive("num_layers", num_layers));
  HW_RETURN_IF_ERROR(CheckPositive("num_query_heads", num_query_heads));
  HW_RETURN_IF_ERROR(CheckPositive("num_kv_heads", num_kv_heads));
  HW_RETURN_IF_ERROR(CheckPositive("total_kv_heads", total_kv_heads));
  HW_RETURN_IF_ERROR(CheckPositive("total_query_heads", total_query_heads));
  HW_RETURN_IF_ERROR(CheckPositive("head_dim", head_dim));
  HW_RETURN_IF_ERROR(CheckPositive("page_tokens", page_tokens));
  HW_RETURN_IF_ERROR(
      CheckDivides("num_kv_heads", num_kv_heads, "num_query_heads", num_query_heads));
  HW_RETURN_IF_ERROR(
      CheckDivides("total_kv_heads", total_kv_heads, "total_query_heads", total_query_heads));
  if (first_kv_head < 0 || first_kv_head + num_kv_heads > total_kv_heads) {
    return absl::InvalidArgumentError(
        absl::StrCat("KV heads are [", first_kv_head, ", ", first_kv_head + num_kv_heads,
                     "), want them within the model's ", total_kv_heads));
  }
  return absl::OkStatus();
}

LayerBytes DeviceLayerBytes(const KvShape& shape, int num_sets, int64_t capacity) {
  HW_CHECK(num_sets == 1 || num_sets == shape.num_kv_heads);
  LayerBytes bytes;
  bytes.slots = capacity * shape.num_kv_heads * shape.row_bytes();
  bytes.scores = capacity * (num_sets + shape.num_kv_heads) * int64_t{sizeof(int64_t)};
  bytes.tables = capacity * num_sets * int64_t{sizeof(Position)};
  return bytes;
}

int64_t FullCacheBytes(const KvShape& shape, int64_t tokens) {
  const int64_t pages = (tokens + shape.page_tokens - 1) / shape.page_tokens;
  return pages * shape.page_tokens * shape.row_bytes() * shape.num_kv_heads * shape.num_layers;
}

}  // namespace heavywater
