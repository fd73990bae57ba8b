#include "tests/bench/cuda/llama_file.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "cache_service/base/float16.h"
#include "tests/worker/model/gguf_writer.h"

namespace heavywater {
namespace {

constexpr size_t kTableSize = 1 << 16;

// Adds matrices of random weights: each weight is one of kTableSize values.
class Matrices {
 public:
  explicit Matrices(GgufWriter& writer) : writer_(writer) {
    for (size_t i = 0; i < kTableSize; ++i) {
      const float uniform = 2 * (static_cast<float>(i) + 0.5f) / kTableSize - 1;
      table_.push_back(uniform);
    }
  }

  void Add(const std::string& name, int64_t rows, int64_t cols) {
    const float scale = std::sqrt(3.0f / static_cast<float>(cols));  // variance 1 / cols
    std::vector<uint16_t> halves;
    for (const float value : table_) halves.push_back(FloatToFloat16(value * scale));
    std::string bytes(rows * cols * sizeof(uint16_t), '\0');
    auto* const to = reinterpret_cast<uint16_t*>(bytes.data());
    for (int64_t i = 0; i < rows * cols; ++i) to[i] = halves[Next() % kTableSize];
    writer_.RawTensor(name, TensorType::kF16,
                      {static_cast<uint64_t>(cols), static_cast<uint64_t>(rows)}, bytes);
  }
  void AddNorm(const std::string& name, int64_t size) {
    writer_.Tensor(name, 0, size, std::vector<float>(size, 1.0f));
  }

 private:
  // xorshift: good enough for weights, and fast.
  uint64_t Next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ >> 16;
  }

  GgufWriter& writer_;
  std::vector<float> table_;
  uint64_t state_ = 0x9e3779b97f4a7c15u;
};

void AddFields(const LlamaFileShape& shape, GgufWriter& writer) {
  const auto number = [](int value) { return static_cast<uint32_t>(value); };
  writer.Field("general.architecture", "llama")
      .Field("general.name", "random")
      .Field("llama.block_count", number(shape.layers))
      .Field("llama.context_length", number(131072))
      .Field("llama.embedding_length", number(shape.hidden))
      .Field("llama.feed_forward_length", number(shape.ffn))
      .Field("llama.attention.head_count", number(shape.query_heads))
      .Field("llama.attention.head_count_kv", number(shape.kv_heads))
      .Field("llama.attention.key_length", number(shape.head_dim))
      .Field("llama.attention.value_length", number(shape.head_dim))
      .Field("llama.rope.freq_base", 500000.0f)
      .Field("llama.attention.layer_norm_rms_epsilon", 1e-5f);
}

}  // namespace

std::string RandomLlamaFile(const LlamaFileShape& shape) {
  GgufWriter writer;
  AddFields(shape, writer);
  Matrices matrices(writer);
  const int64_t q = int64_t{shape.query_heads} * shape.head_dim;
  const int64_t kv = int64_t{shape.kv_heads} * shape.head_dim;
  matrices.Add("token_embd.weight", shape.vocab, shape.hidden);
  matrices.AddNorm("output_norm.weight", shape.hidden);
  for (int i = 0; i < shape.layers; ++i) {
    const std::string layer = "blk." + std::to_string(i) + ".";
    matrices.AddNorm(layer + "attn_norm.weight", shape.hidden);
    matrices.Add(layer + "attn_q.weight", q, shape.hidden);
    matrices.Add(layer + "attn_k.weight", kv, shape.hidden);
    matrices.Add(layer + "attn_v.weight", kv, shape.hidden);
    matrices.Add(layer + "attn_output.weight", shape.hidden, q);
    matrices.AddNorm(layer + "ffn_norm.weight", shape.hidden);
    matrices.Add(layer + "ffn_gate.weight", shape.ffn, shape.hidden);
    matrices.Add(layer + "ffn_up.weight", shape.ffn, shape.hidden);
    matrices.Add(layer + "ffn_down.weight", shape.hidden, shape.ffn);
  }
  return writer.Finish();
}

}  // namespace heavywater
