// What the CUDA runner keeps on the device, as plain arithmetic: also where there is
// neither device nor toolkit (heavywater plan-memory).
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "worker/model/cuda/weight_type.h"
#include "worker/model/llama_weights.h"
#include "worker/model/model_config.h"
#include "worker/model/rank_shard.h"

namespace heavywater {

// "fp32", "bf16"; INVALID_ARGUMENT names both.
absl::StatusOr<WeightType> ParseWeightType(const std::string& name);

inline WeightFormat FormatOf(WeightType type) { return {.matrix_bytes = BytesOf(type)}; }

// cuBLAS's scratch, within the workspace: what it recommends for its fastest kernels.
inline constexpr int64_t kMatmulScratchBytes = int64_t{32} << 20;

// Places in the runner's one allocation beside the weights, in bytes from its begin.
// Rows of type T are the weights'.
struct RunnerWorkspace {
  int64_t normed = 0;     // [max tokens][hidden] of T
  int64_t attention = 0;  // [max tokens][query heads * head_dim] of T
  int64_t inner = 0;      // [max tokens][ffn] of T
  int64_t qkv = 0;        // [max tokens][qkv rows] float32
  int64_t gate_up = 0;    // [max tokens][2 * ffn] float32
  int64_t partial = 0;    // [max tokens][hidden] float32
  int64_t logits = 0;     // [logits tokens][max_vocab] float32
  int64_t gathered = 0;   // [ranks][logits tokens][max_vocab] float32
  int64_t rows = 0;       // [max tokens] int32: embedding rows
  int64_t cosines = 0;    // [max tokens][head_dim / 2] float32
  int64_t sines = 0;      // likewise
  int64_t matmul = 0;     // [kMatmulScratchBytes]
  int64_t bytes = 0;      // in all
};
RunnerWorkspace LayOutRunnerWorkspace(const ModelConfig& config, const RankShard& shard,
                                      int64_t max_batch_tokens, WeightType type);

int64_t CudaRunnerWeightBytes(const ModelConfig& config, const RankShard& shard,
                              WeightType type = WeightType::kBFloat16);
int64_t CudaRunnerWorkspaceBytes(const ModelConfig& config, const RankShard& shard,
                                 int64_t max_batch_tokens, WeightType type = WeightType::kBFloat16);

}  // namespace heavywater
