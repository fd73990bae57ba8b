#include "worker/model/model_config.h"

#include <cmath>

#include "cache_service/base/status.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

// Above every published model; keep the bytes of all weights far from overflow.
constexpr int64_t kMaxSize = 1 << 24;
constexpr int64_t kMaxLayers = 1 << 10;
constexpr int64_t kMaxHeads = 1 << 12;
constexpr int64_t kMaxHeadDim = 1 << 12;

absl::StatusOr<int> ReadSize(const GgufFile& file, std::string_view field, int64_t limit) {
  HW_ASSIGN_OR_RETURN(const int64_t value, file.GetInteger(field));
  if (value < 1 || value > limit) {
    return absl::InvalidArgumentError(
        Message("field '", field, "' is ", value, ", want 1 to ", limit));
  }
  return static_cast<int>(value);
}

absl::StatusOr<int> ReadSizeOr(const GgufFile& file, std::string_view field, int64_t limit,
                               int otherwise) {
  if (!file.Has(field)) return otherwise;
  return ReadSize(file, field, limit);
}

absl::StatusOr<double> ReadPositive(const GgufFile& file, std::string_view field) {
  HW_ASSIGN_OR_RETURN(const double value, file.GetFloat(field));
  if (!std::isfinite(value) || value <= 0) {
    return absl::InvalidArgumentError(
        Message("field '", field, "' is ", value, ", want a positive number"));
  }
  return value;
}

absl::Status CheckArchitecture(const GgufFile& file) {
  HW_ASSIGN_OR_RETURN(const auto architecture, file.GetString("general.architecture"));
  if (architecture != "llama") {
    return absl::UnimplementedError(
        Message("field 'general.architecture' is '", architecture, "', want 'llama'"));
  }
  if (file.Has("llama.expert_count")) {
    HW_ASSIGN_OR_RETURN(const int64_t experts, file.GetInteger("llama.expert_count"));
    if (experts != 0) {
      return absl::UnimplementedError(
          Message("field 'llama.expert_count' is ", experts, ", want 0"));
    }
  }
  if (file.Has("llama.rope.scaling.type")) {
    HW_ASSIGN_OR_RETURN(const auto scaling, file.GetString("llama.rope.scaling.type"));
    if (scaling != "none") {
      return absl::UnimplementedError(
          Message("field 'llama.rope.scaling.type' is '", scaling, "', want 'none'"));
    }
  }
  return absl::OkStatus();
}

absl::Status ReadHeads(const GgufFile& file, ModelConfig& config) {
  HW_ASSIGN_OR_RETURN(config.num_query_heads,
                      ReadSize(file, "llama.attention.head_count", kMaxHeads));
  HW_ASSIGN_OR_RETURN(config.num_kv_heads, ReadSizeOr(file, "llama.attention.head_count_kv",
                                                      kMaxHeads, config.num_query_heads));
  if (config.num_query_heads % config.num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        Message("field 'llama.attention.head_count' is ", config.num_query_heads,
                ", want a multiple of 'llama.attention.head_count_kv', ", config.num_kv_heads));
  }
  HW_ASSIGN_OR_RETURN(config.head_dim, ReadSizeOr(file, "llama.attention.key_length", kMaxHeadDim,
                                                  config.hidden_size / config.num_query_heads));
  for (const std::string_view field :
       {"llama.attention.value_length", "llama.rope.dimension_count"}) {
    HW_ASSIGN_OR_RETURN(const int size, ReadSizeOr(file, field, kMaxHeadDim, config.head_dim));
    if (size != config.head_dim) {
      return absl::UnimplementedError(
          Message("field '", field, "' is ", size, ", want the head size, ", config.head_dim));
    }
  }
  if (config.head_dim < 2 || config.head_dim > kMaxHeadDim || config.head_dim % 2 != 0) {
    return absl::InvalidArgumentError(
        Message("the head size is ", config.head_dim, ", want an even number up to ", kMaxHeadDim));
  }
  return absl::OkStatus();
}

absl::Status ReadVocabulary(const GgufFile& file, ModelConfig& config) {
  HW_ASSIGN_OR_RETURN(const GgufTensor embedding, file.GetTensor("token_embd.weight"));
  if (embedding.rows > kMaxSize) {
    return absl::InvalidArgumentError(
        Message("tensor 'token_embd.weight' has ", embedding.rows, " rows, limit ", kMaxSize));
  }
  config.vocab_size = static_cast<int>(embedding.rows);
  HW_ASSIGN_OR_RETURN(const int declared,
                      ReadSizeOr(file, "llama.vocab_size", kMaxSize, config.vocab_size));
  if (declared != config.vocab_size) {
    return absl::InvalidArgumentError(Message("field 'llama.vocab_size' is ", declared,
                                              ", but tensor 'token_embd.weight' has ",
                                              config.vocab_size, " rows"));
  }
  config.tied_embeddings = file.FindTensor("output.weight") == nullptr;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> ReadModelConfig(const GgufFile& file) {
  HW_RETURN_IF_ERROR(CheckArchitecture(file));
  ModelConfig config;
  if (file.Has("general.name")) {
    HW_ASSIGN_OR_RETURN(config.name, file.GetString("general.name"));
  }
  HW_ASSIGN_OR_RETURN(config.num_layers, ReadSize(file, "llama.block_count", kMaxLayers));
  HW_ASSIGN_OR_RETURN(config.hidden_size, ReadSize(file, "llama.embedding_length", kMaxSize));
  HW_ASSIGN_OR_RETURN(config.ffn_size, ReadSize(file, "llama.feed_forward_length", kMaxSize));
  HW_ASSIGN_OR_RETURN(config.context_length, ReadSize(file, "llama.context_length", kMaxSize));
  HW_ASSIGN_OR_RETURN(config.rms_epsilon,
                      ReadPositive(file, "llama.attention.layer_norm_rms_epsilon"));
  config.rope_base = 10000.0;  // GGUF's default
  if (file.Has("llama.rope.freq_base")) {
    HW_ASSIGN_OR_RETURN(config.rope_base, ReadPositive(file, "llama.rope.freq_base"));
  }
  HW_RETURN_IF_ERROR(ReadHeads(file, config));
  HW_RETURN_IF_ERROR(ReadVocabulary(file, config));
  return config;
}

}  // namespace heavywater
