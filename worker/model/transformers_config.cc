#include "worker/model/transformers_config.h"

#include <algorithm>
#include <cmath>

#include "cache_service/base/status.h"
#include "worker/model/json_fields.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

using Json = nlohmann::json;

// Features that change what is computed, and the value at which they do not.
absl::Status CheckUnused(const JsonFields& fields) {
  HW_ASSIGN_OR_RETURN(const std::string activation, fields.TextOr("hidden_act", "silu"));
  if (activation != "silu") {
    return absl::UnimplementedError(
        Message("field 'hidden_act' is ", Quoted(activation), ", want silu"));
  }
  HW_ASSIGN_OR_RETURN(const double rotated, fields.PositiveOr("partial_rotary_factor", 1));
  if (rotated != 1) {
    return absl::UnimplementedError(
        Message("field 'partial_rotary_factor' is ", rotated, ", want 1"));
  }
  for (const std::string_view field : {"quantization_config", "compression_config"}) {
    if (!fields.Has(field)) continue;
    return absl::UnimplementedError(
        Message("field '", field, "' is set, want weights in F32, F16 or BF16"));
  }
  return absl::OkStatus();
}

// Within a sliding window attention is causal attention: that much is served.
absl::Status LimitToWindow(const JsonFields& fields, ModelConfig& config) {
  const bool optional = config.architecture != "mistral";  // Qwen has a switch beside it
  HW_ASSIGN_OR_RETURN(const bool slides, fields.BoolOr("use_sliding_window", !optional));
  if (!slides) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(const int window, fields.SizeOr("sliding_window", kMaxModelSize,
                                                      static_cast<int>(config.context_length)));
  config.context_length = std::min<int64_t>(config.context_length, window);
  return absl::OkStatus();
}

absl::Status ReadYarn(const JsonFields& fields, RopeScaling& scaling) {
  HW_ASSIGN_OR_RETURN(scaling.beta_fast, fields.PositiveOr("beta_fast", scaling.beta_fast));
  HW_ASSIGN_OR_RETURN(scaling.beta_slow, fields.PositiveOr("beta_slow", scaling.beta_slow));
  HW_ASSIGN_OR_RETURN(scaling.truncate, fields.BoolOr("truncate", true));
  if (fields.Has("attention_factor")) {
    HW_ASSIGN_OR_RETURN(scaling.magnitude, fields.Positive("attention_factor"));
    return absl::OkStatus();
  }
  for (const std::string_view field : {"mscale", "mscale_all_dim"}) {  // DeepSeek's
    if (!fields.Has(field)) continue;
    return absl::UnimplementedError(
        Message("field '", fields.Name(field), "' is set, want attention_factor or none"));
  }
  return absl::OkStatus();
}

// `fields` of rope_scaling or, since Transformers 5, rope_parameters. `original_context`
// where they have none.
absl::Status ReadScaling(const JsonFields& fields, double original_context, ModelConfig& config) {
  RopeScaling& scaling = config.rope_scaling;
  const std::string_view type = fields.Has("rope_type") ? "rope_type" : "type";
  HW_ASSIGN_OR_RETURN(const std::string name, fields.TextOr(type, "default"));
  HW_ASSIGN_OR_RETURN(scaling.kind, ParseRopeScaling(fields.Name(type), name));
  if (scaling.kind == RopeScaling::Kind::kNone) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(scaling.factor, fields.Positive("factor"));
  HW_ASSIGN_OR_RETURN(scaling.original_context,
                      fields.PositiveOr("original_max_position_embeddings", original_context));
  if (scaling.kind == RopeScaling::Kind::kYarn) return ReadYarn(fields, scaling);
  if (scaling.kind != RopeScaling::Kind::kLlama3) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(scaling.low_frequency_factor, fields.Positive("low_freq_factor"));
  HW_ASSIGN_OR_RETURN(scaling.high_frequency_factor, fields.Positive("high_freq_factor"));
  return absl::OkStatus();
}

absl::Status ReadRope(const JsonFields& fields, ModelConfig& config) {
  HW_ASSIGN_OR_RETURN(config.rope_base, fields.PositiveOr("rope_theta", 10000.0));
  HW_ASSIGN_OR_RETURN(const double original,
                      fields.PositiveOr("original_max_position_embeddings",
                                        static_cast<double>(config.context_length)));
  for (const std::string_view field : {"rope_scaling", "rope_parameters"}) {
    const Json* object = fields.Find(field);
    if (object == nullptr) continue;
    if (!object->is_object()) {
      return absl::InvalidArgumentError(Message("field '", field, "' is no object"));
    }
    const JsonFields inner(*object, Message(field, "."));
    HW_ASSIGN_OR_RETURN(config.rope_base, inner.PositiveOr("rope_theta", config.rope_base));
    HW_RETURN_IF_ERROR(ReadScaling(inner, original, config));
  }
  return absl::OkStatus();
}

absl::Status ReadSizes(const JsonFields& fields, ModelConfig& config) {
  HW_ASSIGN_OR_RETURN(config.num_layers, fields.Size("num_hidden_layers", kMaxModelLayers));
  HW_ASSIGN_OR_RETURN(config.hidden_size, fields.Size("hidden_size", kMaxModelSize));
  HW_ASSIGN_OR_RETURN(config.ffn_size, fields.Size("intermediate_size", kMaxModelSize));
  HW_ASSIGN_OR_RETURN(config.vocab_size, fields.Size("vocab_size", kMaxModelSize));
  HW_ASSIGN_OR_RETURN(config.num_query_heads, fields.Size("num_attention_heads", kMaxModelHeads));
  HW_ASSIGN_OR_RETURN(config.num_kv_heads,
                      fields.SizeOr("num_key_value_heads", kMaxModelHeads, config.num_query_heads));
  HW_ASSIGN_OR_RETURN(config.head_dim, fields.SizeOr("head_dim", kMaxHeadDim,
                                                     config.hidden_size / config.num_query_heads));
  HW_ASSIGN_OR_RETURN(config.rms_epsilon, fields.PositiveOr("rms_norm_eps", 1e-6));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> ParseTransformersConfig(const Json& json, bool has_output) {
  const JsonFields fields(json);
  ModelConfig config;
  HW_ASSIGN_OR_RETURN(const std::string type, fields.Text("model_type"));
  HW_ASSIGN_OR_RETURN(const Architecture architecture, FindArchitecture("model_type", type));
  config.architecture = architecture.name;
  config.qkv_bias = architecture.qkv_bias;
  config.qk_norm = architecture.qk_norm;
  config.rotary_rows = RotaryRows::kHalves;
  HW_RETURN_IF_ERROR(CheckUnused(fields));
  HW_RETURN_IF_ERROR(ReadSizes(fields, config));
  HW_ASSIGN_OR_RETURN(config.context_length, fields.Size("max_position_embeddings", kMaxModelSize));
  HW_RETURN_IF_ERROR(ReadRope(fields, config));  // of the whole context
  HW_RETURN_IF_ERROR(LimitToWindow(fields, config));
  HW_ASSIGN_OR_RETURN(config.tied_embeddings, fields.BoolOr("tie_word_embeddings", !has_output));
  HW_RETURN_IF_ERROR(CheckModelConfig(config, {.query_heads = "num_attention_heads",
                                               .kv_heads = "num_key_value_heads",
                                               .rope_scaling = "rope_scaling"}));
  return config;
}

}  // namespace heavywater
