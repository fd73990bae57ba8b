// Hyperparameters of a Llama-family model.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "worker/model/gguf_file.h"

namespace heavywater {

struct ModelConfig {
  std::string name;  // general.name, may be empty
  int num_layers = 0;
  int hidden_size = 0;
  int num_query_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int ffn_size = 0;
  int vocab_size = 0;
  int64_t context_length = 0;  // positions the model was trained on
  double rope_base = 0;        // all of head_dim is rotated
  double rms_epsilon = 0;
  bool tied_embeddings = false;  // the logits use the embedding table

  int group_size() const { return num_query_heads / num_kv_heads; }
};

// Reads and checks the configuration. UNIMPLEMENTED for an architecture other
// than "llama" and for features this runner does not compute (scaled RoPE,
// partly rotated heads, experts); INVALID_ARGUMENT or NOT_FOUND naming the
// field for values that cannot be.
absl::StatusOr<ModelConfig> ReadModelConfig(const GgufFile& file);

}  // namespace heavywater
