#include "worker/model/cuda/runner_bytes.h"

#include <algorithm>

#include "worker/model/llama_runner.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

constexpr int64_t kAlignBytes = 256;
constexpr int64_t kFloatBytes = sizeof(float);

}  // namespace

absl::StatusOr<WeightType> ParseWeightType(const std::string& name) {
  if (name == "fp32") return WeightType::kFloat32;
  if (name == "bf16") return WeightType::kBFloat16;
  return absl::InvalidArgumentError(
      Message("weights_dtype is ", Quoted(name), ", want one of fp32, bf16"));
}

RunnerWorkspace LayOutRunnerWorkspace(const ModelConfig& config, const RankShard& shard,
                                      int64_t max_batch_tokens, WeightType type) {
  RunnerWorkspace places;
  const auto take = [&](int64_t rows, int64_t cols, int64_t element_bytes) {
    const int64_t place = places.bytes;
    const int64_t bytes = rows * cols * element_bytes;
    places.bytes += (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    return place;
  };
  const int64_t tokens = max_batch_tokens;
  const int64_t logits_tokens = std::min(LlamaRunner::kLogitsTokens, tokens);
  const int64_t heads = shard.query_heads.size + 2 * shard.kv_heads.size;
  const int64_t half = config.head_dim / 2;
  places.normed = take(tokens, config.hidden_size, BytesOf(type));
  places.attention = take(tokens, shard.query_heads.size * config.head_dim, BytesOf(type));
  places.inner = take(tokens, shard.ffn.size, BytesOf(type));
  places.qkv = take(tokens, heads * config.head_dim, kFloatBytes);
  places.gate_up = take(tokens, 2 * shard.ffn.size, kFloatBytes);
  places.partial = take(tokens, config.hidden_size, kFloatBytes);
  places.logits = take(logits_tokens, shard.max_vocab, kFloatBytes);
  places.gathered = take(shard.size * logits_tokens, shard.max_vocab, kFloatBytes);
  places.rows = take(tokens, 1, sizeof(int32_t));
  places.cosines = take(tokens, half, kFloatBytes);
  places.sines = take(tokens, half, kFloatBytes);
  places.matmul = take(1, kMatmulScratchBytes, 1);
  return places;
}

int64_t CudaRunnerWeightBytes(const ModelConfig& config, const RankShard& shard, WeightType type) {
  int64_t bytes = 0;
  LayOutLlamaWeights(config, shard, FormatOf(type), bytes);
  return bytes;
}

int64_t CudaRunnerWorkspaceBytes(const ModelConfig& config, const RankShard& shard,
                                 int64_t max_batch_tokens, WeightType type) {
  return LayOutRunnerWorkspace(config, shard, max_batch_tokens, type).bytes;
}

}  // namespace heavywater
