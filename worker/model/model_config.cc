#include "worker/model/model_config.h"

#include <algorithm>
#include <array>

#include "worker/model/message.h"

namespace heavywater {
namespace {

constexpr std::array<Architecture, 4> kArchitectures = {
    {{.name = "llama", .gguf_rows = RotaryRows::kNeighbours},
     {.name = "mistral", .gguf_rows = RotaryRows::kNeighbours},
     {.name = "qwen2", .qkv_bias = true},
     {.name = "qwen3", .qk_norm = true}}};

absl::Status CheckScaling(const RopeScaling& scaling, const std::string& name) {
  using Kind = RopeScaling::Kind;
  if (scaling.kind == Kind::kNone) return absl::OkStatus();
  const auto error = [&](std::string_view what, double got, std::string_view want) {
    return absl::InvalidArgumentError(
        Message("the ", what, " of '", name, "' is ", got, ", want ", want));
  };
  if (scaling.factor < 1) return error("factor", scaling.factor, "1 or more");
  if (scaling.kind == Kind::kLinear) return absl::OkStatus();
  if (scaling.original_context < 1) {
    return error("original context", scaling.original_context, "1 or more");
  }
  if (scaling.kind == Kind::kLlama3 &&
      scaling.low_frequency_factor >= scaling.high_frequency_factor) {
    return error("low frequency factor", scaling.low_frequency_factor,
                 "less than the high frequency factor");
  }
  if (scaling.kind == Kind::kYarn && scaling.beta_slow >= scaling.beta_fast) {
    return error("beta_slow", scaling.beta_slow, "less than beta_fast");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Architecture> FindArchitecture(std::string_view field, std::string_view name) {
  const auto* const found = std::ranges::find(kArchitectures, name, &Architecture::name);
  if (found != kArchitectures.end()) return *found;
  return absl::UnimplementedError(Message("field '", field, "' is ", Quoted(name),
                                          ", want one of llama, mistral, qwen2, qwen3"));
}

absl::Status CheckModelConfig(const ModelConfig& config, const ConfigNames& names) {
  if (config.num_query_heads % config.num_kv_heads != 0) {
    return absl::InvalidArgumentError(Message("field '", names.query_heads, "' is ",
                                              config.num_query_heads, ", want a multiple of '",
                                              names.kv_heads, "', ", config.num_kv_heads));
  }
  if (config.head_dim < 2 || config.head_dim > kMaxHeadDim || config.head_dim % 2 != 0) {
    return absl::InvalidArgumentError(
        Message("the head size is ", config.head_dim, ", want an even number up to ", kMaxHeadDim));
  }
  return CheckScaling(config.rope_scaling, names.rope_scaling);
}

}  // namespace heavywater
