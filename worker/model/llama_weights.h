// A rank's share of a Llama model's weights, dequantised to float32.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/model/gguf_file.h"
#include "worker/model/model_config.h"
#include "worker/model/rank_shard.h"

namespace heavywater {

// Row-major [rows][cols]; a vector is one row. Lives in LlamaWeights::memory.
struct WeightMatrix {
  const float* data = nullptr;
  int64_t rows = 0;
  int64_t cols = 0;

  const float* row(int64_t index) const { return data + index * cols; }
};

struct LlamaLayer {
  WeightMatrix attn_norm;    // [1][hidden]
  WeightMatrix qkv;          // [(query_heads + 2 kv_heads) * head_dim][hidden]: own heads' Q,
                             // then K, then V; Q and K for RoPE in halves
  WeightMatrix attn_output;  // [hidden][query_heads * head_dim]
  WeightMatrix ffn_norm;     // [1][hidden]
  WeightMatrix gate_up;      // [2 * ffn][hidden]: gate, then up
  WeightMatrix ffn_down;     // [hidden][ffn]
};

struct LlamaWeights {
  WeightMatrix embedding;           // [vocab][hidden], own rows
  WeightMatrix output;              // [vocab][hidden]; the embedding itself when tied
  WeightMatrix output_norm;         // [1][hidden]
  std::vector<float> rope_factors;  // [head_dim / 2], or empty
  std::vector<LlamaLayer> layers;
  DeviceBuffer memory;  // CPU memory: this is the CPU runner's
};

// Elements of a rank's weights, padding included.
struct WeightCounts {
  int64_t all = 0;
  // A step reads every matrix but the embedding, of which it reads a row a token;
  // tied, the embedding is the output's matrix.
  int64_t read_by_step = 0;
};
WeightCounts CountWeights(const ModelConfig& config, const RankShard& shard);

// Reads only the rank's rows and columns. One allocation, no second copy.
// INVALID_ARGUMENT for a tensor of another shape, NOT_FOUND for a missing one,
// UNIMPLEMENTED for one that this runner would have to ignore (a bias, say);
// each names it. RESOURCE_EXHAUSTED from the backend.
absl::StatusOr<LlamaWeights> LoadLlamaWeights(const GgufFile& file, const ModelConfig& config,
                                              const RankShard& shard, Backend& backend);

}  // namespace heavywater
