#include "worker/server/engine_facts.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/server/model_info.h"

namespace heavywater {
namespace {

constexpr size_t kMaxNameBytes = 128;
// gRPC's 4 MiB, less what lies around the rows.
constexpr int64_t kMaxRowsBytes = (4 << 20) - (4 << 10);

struct Number {
  const char* field;
  int64_t got;
  int64_t high;
};

absl::Status CheckAbsent(const v1::WorkerConfig& config) {
  const bool any = !config.engine_model().empty() || config.engine_layers() != 0 ||
                   config.engine_query_heads() != 0 || config.engine_kv_heads() != 0 ||
                   config.engine_head_dim() != 0 || config.engine_attention_scale() != 0;
  if (!any) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("engine_* fields are set, but model is \"",
                                                 config.model(), "\", want \"", kNoModel, "\""));
}

}  // namespace

absl::Status CheckEngineConfig(const v1::WorkerConfig& config) {
  if (!ServesEngines(config)) return CheckAbsent(config);
  const std::string& name = config.engine_model();
  if (name.empty() || name.size() > kMaxNameBytes) {
    return absl::InvalidArgumentError(absl::StrCat("engine_model has ", name.size(),
                                                   " bytes, want a name of 1 to ", kMaxNameBytes));
  }
  const Number numbers[] = {{"engine_layers", config.engine_layers(), 4096},
                            {"engine_query_heads", config.engine_query_heads(), 4096},
                            {"engine_kv_heads", config.engine_kv_heads(), 4096},
                            {"engine_head_dim", config.engine_head_dim(), 4096}};
  for (const Number& number : numbers) {
    if (number.got >= 1 && number.got <= number.high) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(number.field, " is ", number.got, ", want 1 to ", number.high));
  }
  const double scale = config.engine_attention_scale();
  if (!std::isfinite(scale) || scale < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("engine_attention_scale is ", scale, ", want a finite number of 0 or more"));
  }
  if (!config.dump_dir().empty()) {
    return absl::InvalidArgumentError(
        "dump_dir is set, but model is \"none\": want it empty, Kept and ReadKv tell the same");
  }
  if (!config.record_dir().empty()) {
    return absl::InvalidArgumentError(
        "record_dir is set, but model is \"none\": want it empty, the engine has its Q, K and V");
  }
  return absl::OkStatus();
}

absl::StatusOr<KvShape> EngineShape(const v1::WorkerConfig& config) {
  const int size = config.size();
  if (config.engine_query_heads() % size != 0) {
    return absl::InvalidArgumentError(absl::StrCat("engine_query_heads is ",
                                                   config.engine_query_heads(),
                                                   ", want a multiple of size, ", size));
  }
  KvShape shape;
  shape.num_layers = config.engine_layers();
  shape.num_query_heads = config.engine_query_heads() / size;
  shape.num_kv_heads = std::max(config.engine_kv_heads() / size, 1);
  shape.first_kv_head = static_cast<int>(int64_t{config.rank()} * config.engine_kv_heads() / size);
  shape.total_kv_heads = config.engine_kv_heads();
  shape.total_query_heads = config.engine_query_heads();
  shape.head_dim = config.engine_head_dim();
  HW_ASSIGN_OR_RETURN(shape.dtype, ParseKvDtype(config.kv_dtype()));
  shape.page_tokens = config.page_tokens();
  HW_RETURN_IF_ERROR(shape.Validate());
  return shape;
}

v1::Fingerprint EngineFingerprint(const v1::WorkerConfig& config, const KvShape& shape) {
  v1::Fingerprint fingerprint;
  fingerprint.set_model(config.engine_model());
  fingerprint.set_dtype(std::string(KvDtypeName(shape.dtype)));
  fingerprint.set_num_layers(shape.num_layers);
  fingerprint.set_num_kv_heads(shape.total_kv_heads);
  fingerprint.set_head_dim(shape.head_dim);
  fingerprint.set_rope("engine");
  fingerprint.set_positions("absolute");
  fingerprint.set_page_tokens(shape.page_tokens);
  fingerprint.set_format_version(kPageFormatVersion);
  return fingerprint;
}

absl::StatusOr<int> EngineStepTokens(const v1::WorkerConfig& config, const KvShape& shape) {
  const int64_t row = (int64_t{shape.num_query_heads} + 2 * shape.num_kv_heads) * shape.head_dim *
                      int64_t{sizeof(float)};
  if (row > kMaxRowsBytes) {
    return absl::InvalidArgumentError(absl::StrCat("queries, keys and values of one token have ",
                                                   row, " bytes on a rank, want at most ",
                                                   kMaxRowsBytes, ", a message"));
  }
  return static_cast<int>(std::min<int64_t>(config.prompt_chunk_tokens(), kMaxRowsBytes / row));
}

}  // namespace heavywater
