#include "worker/sizing/model_presets.h"

#include "worker/model/message.h"

namespace heavywater {
namespace {

// What both have in common.
ModelConfig Llama3(std::string_view name) {
  ModelConfig config;
  config.name = std::string(name);
  config.num_kv_heads = 8;
  config.head_dim = 128;
  config.vocab_size = 128256;
  config.context_length = 8192;
  config.rope_base = 500000;
  config.rms_epsilon = 1e-5;
  return config;
}

}  // namespace

absl::StatusOr<ModelConfig> ModelPreset(std::string_view name) {
  ModelConfig config = Llama3(name);
  if (name == "llama-3-8b") {
    config.num_layers = 32;
    config.hidden_size = 4096;
    config.num_query_heads = 32;
    config.ffn_size = 14336;
    return config;
  }
  if (name == "llama-3-70b") {
    config.num_layers = 80;
    config.hidden_size = 8192;
    config.num_query_heads = 64;
    config.ffn_size = 28672;
    return config;
  }
  return absl::InvalidArgumentError(
      Message("model is ", Quoted(name), ", want one of: llama-3-8b, llama-3-70b"));
}

}  // namespace heavywater
