// ReadModelConfig(): a GGUF file's metadata as a ModelConfig.
#include <algorithm>
#include <cmath>

#include "cache_service/base/status.h"
#include "worker/model/gguf_file.h"
#include "worker/model/message.h"
#include "worker/model/model_config.h"
#include "worker/model/utf8.h"

namespace heavywater {
namespace {

// Fields are named after the architecture: "llama.block_count".
class Reader {
 public:
  explicit Reader(const GgufFile& file) : file_(file) {}

  absl::StatusOr<ModelConfig> Read() {
    HW_RETURN_IF_ERROR(ReadArchitecture());
    if (file_.Has("general.name")) {
      HW_ASSIGN_OR_RETURN(config_.name, file_.GetString("general.name"));
      HW_RETURN_IF_ERROR(CheckText("field 'general.name'", config_.name));
    }
    HW_ASSIGN_OR_RETURN(config_.num_layers, Size("block_count", kMaxModelLayers));
    HW_ASSIGN_OR_RETURN(config_.hidden_size, Size("embedding_length", kMaxModelSize));
    HW_ASSIGN_OR_RETURN(config_.ffn_size, Size("feed_forward_length", kMaxModelSize));
    HW_ASSIGN_OR_RETURN(config_.context_length, Size("context_length", kMaxModelSize));
    HW_ASSIGN_OR_RETURN(config_.rms_epsilon, Positive("attention.layer_norm_rms_epsilon"));
    HW_ASSIGN_OR_RETURN(config_.rope_base, PositiveOr("rope.freq_base", 10000.0));
    HW_RETURN_IF_ERROR(ReadHeads());
    HW_RETURN_IF_ERROR(ReadScaling());  // of the whole context
    HW_RETURN_IF_ERROR(LimitToWindow());
    HW_RETURN_IF_ERROR(ReadVocabulary());
    HW_RETURN_IF_ERROR(CheckModelConfig(config_, {.query_heads = Name("attention.head_count"),
                                                  .kv_heads = Name("attention.head_count_kv"),
                                                  .rope_scaling = Name("rope.scaling")}));
    return config_;
  }

 private:
  std::string Name(std::string_view field) const {
    return Message(config_.architecture, ".", field);
  }
  bool Has(std::string_view field) const { return file_.Has(Name(field)); }

  absl::StatusOr<int> Size(std::string_view field, int64_t limit) const {
    HW_ASSIGN_OR_RETURN(const int64_t value, file_.GetInteger(Name(field)));
    if (value < 1 || value > limit) {
      return absl::InvalidArgumentError(
          Message("field '", Name(field), "' is ", value, ", want 1 to ", limit));
    }
    return static_cast<int>(value);
  }

  absl::StatusOr<int> SizeOr(std::string_view field, int64_t limit, int otherwise) const {
    if (!Has(field)) return otherwise;
    return Size(field, limit);
  }

  absl::StatusOr<double> Positive(std::string_view field) const {
    HW_ASSIGN_OR_RETURN(const double value, file_.GetFloat(Name(field)));
    if (!std::isfinite(value) || value <= 0) {
      return absl::InvalidArgumentError(
          Message("field '", Name(field), "' is ", value, ", want a positive number"));
    }
    return value;
  }

  absl::StatusOr<double> PositiveOr(std::string_view field, double otherwise) const {
    if (!Has(field)) return otherwise;
    return Positive(field);
  }

  absl::Status ReadArchitecture() {
    HW_ASSIGN_OR_RETURN(const auto name, file_.GetString("general.architecture"));
    HW_ASSIGN_OR_RETURN(const Architecture architecture,
                        FindArchitecture("general.architecture", name));
    config_.architecture = architecture.name;
    config_.qkv_bias = architecture.qkv_bias;
    config_.qk_norm = architecture.qk_norm;
    config_.rotary_rows = architecture.gguf_rows;
    if (!Has("expert_count")) return absl::OkStatus();
    HW_ASSIGN_OR_RETURN(const int64_t experts, file_.GetInteger(Name("expert_count")));
    if (experts == 0) return absl::OkStatus();
    return absl::UnimplementedError(
        Message("field '", Name("expert_count"), "' is ", experts, ", want 0"));
  }

  // Within a sliding window attention is causal attention: that much is served.
  absl::Status LimitToWindow() {
    const auto context = static_cast<int>(config_.context_length);
    HW_ASSIGN_OR_RETURN(const int window,
                        SizeOr("attention.sliding_window", kMaxModelSize, context));
    config_.context_length = std::min(context, window);
    return absl::OkStatus();
  }

  absl::Status ReadHeads() {
    HW_ASSIGN_OR_RETURN(config_.num_query_heads, Size("attention.head_count", kMaxModelHeads));
    HW_ASSIGN_OR_RETURN(config_.num_kv_heads,
                        SizeOr("attention.head_count_kv", kMaxModelHeads, config_.num_query_heads));
    HW_ASSIGN_OR_RETURN(config_.head_dim, SizeOr("attention.key_length", kMaxHeadDim,
                                                 config_.hidden_size / config_.num_query_heads));
    for (const std::string_view field : {"attention.value_length", "rope.dimension_count"}) {
      HW_ASSIGN_OR_RETURN(const int size, SizeOr(field, kMaxHeadDim, config_.head_dim));
      if (size != config_.head_dim) {
        return absl::UnimplementedError(Message("field '", Name(field), "' is ", size,
                                                ", want the head size, ", config_.head_dim));
      }
    }
    return absl::OkStatus();
  }

  // Llama 3's scaling is a tensor in GGUF, rope_freqs.weight (llama_weights.cc).
  absl::Status ReadScaling() {
    RopeScaling& scaling = config_.rope_scaling;
    if (Has("rope.scale_linear")) {  // as old files say it
      HW_ASSIGN_OR_RETURN(scaling.factor, Positive("rope.scale_linear"));
      if (scaling.factor != 1) scaling.kind = RopeScaling::Kind::kLinear;
    }
    if (!Has("rope.scaling.type")) return absl::OkStatus();
    HW_ASSIGN_OR_RETURN(const auto name, file_.GetString(Name("rope.scaling.type")));
    HW_ASSIGN_OR_RETURN(scaling.kind, ParseRopeScaling(Name("rope.scaling.type"), name));
    if (scaling.kind == RopeScaling::Kind::kNone) return absl::OkStatus();
    HW_ASSIGN_OR_RETURN(scaling.factor, Positive("rope.scaling.factor"));
    HW_ASSIGN_OR_RETURN(scaling.original_context,
                        SizeOr("rope.scaling.original_context_length", kMaxModelSize,
                               static_cast<int>(config_.context_length)));
    HW_ASSIGN_OR_RETURN(scaling.beta_fast, PositiveOr("rope.scaling.yarn_beta_fast", 32));
    HW_ASSIGN_OR_RETURN(scaling.beta_slow, PositiveOr("rope.scaling.yarn_beta_slow", 1));
    HW_RETURN_IF_ERROR(CheckScalingExtras());
    // A factor on top of YaRN's own.
    HW_ASSIGN_OR_RETURN(const double more, PositiveOr("rope.scaling.attn_factor", 1));
    scaling.magnitude = RopeMagnitude(scaling) * more;
    return absl::OkStatus();
  }

  // What some files add to a scaling, and the values at which it changes nothing. A negative
  // yarn_ext_factor is "as the type says".
  absl::Status CheckScalingExtras() const {
    const bool yarn = config_.rope_scaling.kind == RopeScaling::Kind::kYarn;
    const auto check = [this](std::string_view field, double neutral, bool or_negative) {
      if (!Has(field)) return absl::OkStatus();
      const auto value = file_.GetFloat(Name(field));
      if (!value.ok()) return value.status();
      if (*value == neutral || (or_negative && *value < 0)) return absl::OkStatus();
      return absl::UnimplementedError(
          Message("field '", Name(field), "' is ", *value, ", want ", neutral));
    };
    HW_RETURN_IF_ERROR(check("rope.scaling.yarn_ext_factor", yarn ? 1 : 0, true));
    HW_RETURN_IF_ERROR(check("rope.scaling.yarn_attn_factor", 1, false));
    HW_RETURN_IF_ERROR(check("rope.scaling.yarn_log_multiplier", 0, false));
    return yarn ? absl::OkStatus() : check("rope.scaling.attn_factor", 1, false);
  }

  absl::Status ReadVocabulary() {
    HW_ASSIGN_OR_RETURN(const GgufTensor embedding, file_.GetTensor("token_embd.weight"));
    if (embedding.rows > kMaxModelSize) {
      return absl::InvalidArgumentError(Message("tensor 'token_embd.weight' has ", embedding.rows,
                                                " rows, limit ", kMaxModelSize));
    }
    config_.vocab_size = static_cast<int>(embedding.rows);
    HW_ASSIGN_OR_RETURN(const int declared,
                        SizeOr("vocab_size", kMaxModelSize, config_.vocab_size));
    if (declared != config_.vocab_size) {
      return absl::InvalidArgumentError(Message("field '", Name("vocab_size"), "' is ", declared,
                                                ", but tensor 'token_embd.weight' has ",
                                                config_.vocab_size, " rows"));
    }
    config_.tied_embeddings = file_.FindTensor("output.weight") == nullptr;
    return absl::OkStatus();
  }

  const GgufFile& file_;
  ModelConfig config_;
};

}  // namespace

absl::StatusOr<ModelConfig> ReadModelConfig(const GgufFile& file) { return Reader(file).Read(); }

}  // namespace heavywater
