// A rank's share of a Llama model's weights: which matrices there are, where they
// lie, and how they are read from a file (what of its tensors: weight_parts.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/model/model_config.h"
#include "worker/model/model_file.h"
#include "worker/model/packed_rows.h"
#include "worker/model/rank_shard.h"

namespace heavywater {

// Row-major [rows][cols]; a vector is one row. Lives in LlamaWeights::memory: at
// `data` in CPU memory, `offset` bytes from its begin everywhere.
struct WeightMatrix {
  const std::byte* data = nullptr;
  int64_t offset = 0;
  RowCodec codec = RowCodec::kFloat32;  // of `data`; vectors are kFloat32
  bool is_vector = false;
  int64_t rows = 0;
  int64_t cols = 0;

  const std::byte* row(int64_t index) const { return data + index * PackedRowBytes(codec, cols); }
  const float* floats() const { return reinterpret_cast<const float*>(data); }  // of kFloat32
  bool exists() const { return rows > 0; }
};

// What an architecture does without has no rows.
struct LlamaLayer {
  WeightMatrix attn_norm;    // [1][hidden]
  WeightMatrix qkv;          // [(query_heads + 2 kv_heads) * head_dim][hidden]: own heads' Q,
                             // then K, then V; Q and K for RoPE in halves
  WeightMatrix qkv_bias;     // [1][rows of qkv], or none
  WeightMatrix q_norm;       // [1][head_dim], or none
  WeightMatrix k_norm;       // likewise
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
  DeviceBuffer memory;
};

// Bytes of an element.
struct WeightFormat {
  int64_t matrix_bytes = sizeof(float);
  int64_t vector_bytes = sizeof(float);  // of norms and biases
};
// All matrices with their offsets and no memory yet; `bytes` is what they take.
LlamaWeights LayOutLlamaWeights(const ModelConfig& config, const RankShard& shard,
                                const WeightFormat& format, int64_t& bytes);

// Takes matrices as they come out of a file.
class WeightSink {
 public:
  virtual ~WeightSink() = default;
  // Where the matrix is written, float32 [rows][cols]; until Finish(), which follows
  // before the next matrix.
  virtual float* Begin(const WeightMatrix& matrix) = 0;
  virtual absl::Status Finish(const WeightMatrix& matrix) = 0;
};
// Reads the matrices of a layout, only the rank's rows and columns, dequantised.
// INVALID_ARGUMENT for a tensor of another shape, NOT_FOUND for a missing one,
// UNIMPLEMENTED for one that a runner would have to ignore (a bias that the
// architecture does not have, say); each names it. Else the sink's errors.
absl::Status ReadLlamaWeights(const ModelFile& file, const ModelConfig& config,
                              const RankShard& shard, LlamaWeights& weights, WeightSink& sink);

// In the backend's memory, which must be the CPU's: packed as the file has them where
// that is possible (packed_rows.h), else in float32. One allocation, no second copy.
// Errors as ReadLlamaWeights(), RESOURCE_EXHAUSTED from the backend.
absl::StatusOr<LlamaWeights> LoadLlamaWeights(const ModelFile& file, const ModelConfig& config,
                                              const RankShard& shard, Backend& backend);

}  // namespace heavywater
