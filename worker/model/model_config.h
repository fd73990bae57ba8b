// Hyperparameters of a Llama-family model.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/rope_scaling.h"

namespace heavywater {

class GgufFile;

// Which rows of a head's Q and K projections turn together as stored: neighbours, or
// row i and row i + head_dim / 2.
enum class RotaryRows { kNeighbours, kHalves };

// What sets the architectures apart; the rest is common to all of them.
struct Architecture {
  std::string_view name;  // in GGUF and in config.json
  bool qkv_bias = false;
  bool qk_norm = false;  // an RMS norm of each head of Q and K before RoPE
  // In GGUF; in safetensors all have kHalves.
  RotaryRows gguf_rows = RotaryRows::kHalves;
};
// "llama", "mistral" (no GGUF file calls itself so: "llama"), "qwen2", "qwen3".
// UNIMPLEMENTED for others, naming `field`, the value and these.
absl::StatusOr<Architecture> FindArchitecture(std::string_view field, std::string_view name);

struct ModelConfig {
  std::string architecture = "llama";
  std::string name;  // general.name, may be empty
  int num_layers = 0;
  int hidden_size = 0;
  int num_query_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;
  int ffn_size = 0;
  int vocab_size = 0;
  int64_t context_length = 0;  // positions the model was trained on; with a sliding window at
                               // most as many as it has: up to there it leaves nothing out
  double rope_base = 0;        // all of head_dim is rotated
  RopeScaling rope_scaling;
  RotaryRows rotary_rows = RotaryRows::kNeighbours;
  bool qkv_bias = false;
  bool qk_norm = false;
  double rms_epsilon = 0;
  bool tied_embeddings = false;  // the logits use the embedding table

  int group_size() const { return num_query_heads / num_kv_heads; }
};

// Limits above every published model; they keep the bytes of all weights far from overflow.
inline constexpr int64_t kMaxModelSize = 1 << 24;
inline constexpr int64_t kMaxModelLayers = 1 << 10;
inline constexpr int64_t kMaxModelHeads = 1 << 12;
inline constexpr int64_t kMaxHeadDim = 1 << 12;

// Heads that fit each other, and a RoPE scaling that can be computed: INVALID_ARGUMENT
// naming what is wrong, in the names of the file.
struct ConfigNames {
  std::string query_heads, kv_heads, rope_scaling;
};
absl::Status CheckModelConfig(const ModelConfig& config, const ConfigNames& names);

// Reads and checks the configuration of a GGUF file. UNIMPLEMENTED for an architecture
// that is not known and for features this runner does not compute (RoPE scaling of
// another kind, partly rotated heads, experts); INVALID_ARGUMENT or NOT_FOUND naming the
// field for values that cannot be.
absl::StatusOr<ModelConfig> ReadModelConfig(const GgufFile& file);

}  // namespace heavywater
