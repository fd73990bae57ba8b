#include "worker/model/llama_weights.h"

#include <algorithm>
#include <string>

#include "absl/container/flat_hash_set.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/model/dequantize.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

constexpr int64_t kAlignFloats = 16;  // a cache line

// Hands out the buffer's memory piece by piece. Without a buffer it only counts,
// so that one description of the layout serves both.
class Arena {
 public:
  void SetMemory(float* memory) {
    memory_ = memory;
    used_ = 0;
  }
  int64_t used() const { return used_; }

  WeightMatrix Take(int64_t rows, int64_t cols) {
    const WeightMatrix matrix{.data = memory_ == nullptr ? nullptr : memory_ + used_,
                              .offset = used_ * static_cast<int64_t>(sizeof(float)),
                              .rows = rows,
                              .cols = cols};
    used_ += (rows * cols + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
    return matrix;
  }

 private:
  float* memory_ = nullptr;
  int64_t used_ = 0;
};

// Only counts, in bytes, for elements of any size.
class ByteArena {
 public:
  explicit ByteArena(const WeightFormat& format) : format_(format) {}
  int64_t used() const { return used_; }

  WeightMatrix Take(int64_t rows, int64_t cols) {
    const WeightMatrix matrix{.offset = used_, .rows = rows, .cols = cols};
    const int64_t bytes = rows * cols * (rows == 1 ? format_.vector_bytes : format_.matrix_bytes);
    used_ += (bytes + kAlignBytes - 1) / kAlignBytes * kAlignBytes;
    return matrix;
  }

 private:
  static constexpr int64_t kAlignBytes = 256;  // what GPUs load best
  const WeightFormat format_;
  int64_t used_ = 0;
};

template <class AnyArena>
void LayOut(const ModelConfig& config, const RankShard& shard, AnyArena& arena,
            LlamaWeights& weights) {
  const int64_t hidden = config.hidden_size;
  const int64_t head_dim = config.head_dim;
  weights.embedding = arena.Take(shard.vocab.size, hidden);
  weights.output =
      config.tied_embeddings ? weights.embedding : arena.Take(shard.vocab.size, hidden);
  weights.output_norm = arena.Take(1, hidden);
  weights.layers.resize(static_cast<size_t>(config.num_layers));
  for (LlamaLayer& layer : weights.layers) {
    layer.attn_norm = arena.Take(1, hidden);
    layer.qkv = arena.Take((shard.query_heads.size + 2 * shard.kv_heads.size) * head_dim, hidden);
    if (config.qkv_bias) layer.qkv_bias = arena.Take(1, layer.qkv.rows);
    if (config.qk_norm) {
      layer.q_norm = arena.Take(1, head_dim);
      layer.k_norm = arena.Take(1, head_dim);
    }
    layer.attn_output = arena.Take(hidden, shard.query_heads.size * head_dim);
    layer.ffn_norm = arena.Take(1, hidden);
    layer.gate_up = arena.Take(2 * shard.ffn.size, hidden);
    layer.ffn_down = arena.Take(hidden, shard.ffn.size);
  }
}

Range HeadRows(const Range& heads, int64_t head_dim) {
  return {heads.begin * head_dim, heads.size * head_dim};
}

// Matrices that already have memory.
class InPlace final : public WeightSink {
 public:
  float* Begin(const WeightMatrix& matrix) override {
    return const_cast<float*>(matrix.data);  // written here, read only from then on
  }
  absl::Status Finish(const WeightMatrix& matrix) override { return absl::OkStatus(); }
};

// Fills the laid-out matrices from the file.
class Loader {
 public:
  Loader(const ModelFile& file, const ModelConfig& config, const RankShard& shard, WeightSink& sink)
      : file_(file), config_(config), shard_(shard), sink_(sink) {}

  absl::Status LoadAll(LlamaWeights& weights) {
    HW_RETURN_IF_ERROR(LoadVocabulary("token_embd", weights.embedding));
    if (!config_.tied_embeddings) HW_RETURN_IF_ERROR(LoadVocabulary("output", weights.output));
    HW_RETURN_IF_ERROR(LoadVector("output_norm", weights.output_norm));
    HW_RETURN_IF_ERROR(LoadRopeFactors(weights));
    for (size_t i = 0; i < weights.layers.size(); ++i) {
      HW_RETURN_IF_ERROR(LoadLayer(Message("blk.", i, "."), weights.layers[i]));
    }
    return CheckNothingIsLeft();
  }

 private:
  // Where a matrix is written, [rows][cols].
  struct Target {
    float* data = nullptr;
    int64_t cols = 0;
  };

  absl::Status LoadLayer(const std::string& prefix, const LlamaLayer& layer) {
    const int64_t head_dim = config_.head_dim;
    HW_RETURN_IF_ERROR(LoadVector(prefix + "attn_norm", layer.attn_norm));
    HW_RETURN_IF_ERROR(
        Fill(layer.qkv, [&](const Target& to) { return LoadQkv(prefix, ".weight", to); }));
    if (layer.qkv_bias.exists()) {
      HW_RETURN_IF_ERROR(Fill(layer.qkv_bias, [&](const Target& to) {
        return LoadQkv(prefix, ".bias", {to.data, 1});
      }));
    }
    if (layer.q_norm.exists()) {
      HW_RETURN_IF_ERROR(LoadVector(prefix + "attn_q_norm", layer.q_norm));
      HW_RETURN_IF_ERROR(LoadVector(prefix + "attn_k_norm", layer.k_norm));
    }
    HW_RETURN_IF_ERROR(Fill(layer.attn_output, [&](const Target& to) {
      return LoadColumns(prefix + "attn_output.weight", layer.attn_output.rows,
                         config_.num_query_heads * head_dim, HeadRows(shard_.query_heads, head_dim),
                         to);
    }));
    HW_RETURN_IF_ERROR(LoadVector(prefix + "ffn_norm", layer.ffn_norm));
    HW_RETURN_IF_ERROR(
        Fill(layer.gate_up, [&](const Target& to) { return LoadGateUp(prefix, to); }));
    return Fill(layer.ffn_down, [&](const Target& to) {
      return LoadColumns(prefix + "ffn_down.weight", layer.ffn_down.rows, config_.ffn_size,
                         shard_.ffn, to);
    });
  }

  // The heads' rows, of the weights or, one element each, of the bias.
  absl::Status LoadQkv(const std::string& prefix, const std::string& suffix, const Target& to) {
    const int64_t head_dim = config_.head_dim;
    const int64_t q_rows = config_.num_query_heads * head_dim;
    const int64_t kv_rows = config_.num_kv_heads * head_dim;
    const Range q = HeadRows(shard_.query_heads, head_dim);
    const Range kv = HeadRows(shard_.kv_heads, head_dim);
    HW_RETURN_IF_ERROR(LoadRotated(prefix + "attn_q" + suffix, q_rows, q, to, 0));
    HW_RETURN_IF_ERROR(LoadRotated(prefix + "attn_k" + suffix, kv_rows, kv, to, q.size));
    return LoadRows(prefix + "attn_v" + suffix, kv_rows, kv, to, q.size + kv.size);
  }

  absl::Status LoadGateUp(const std::string& prefix, const Target& to) {
    HW_RETURN_IF_ERROR(LoadRows(prefix + "ffn_gate.weight", config_.ffn_size, shard_.ffn, to, 0));
    return LoadRows(prefix + "ffn_up.weight", config_.ffn_size, shard_.ffn, to, shard_.ffn.size);
  }

  // Calls body(where to write the matrix) between Begin() and Finish().
  template <class Body>
  absl::Status Fill(const WeightMatrix& matrix, const Body& body) {
    HW_RETURN_IF_ERROR(body(Target{sink_.Begin(matrix), matrix.cols}));
    return sink_.Finish(matrix);
  }

  // Columns `columns` of the tensor's row `from` as row `to_row` of the target. Every
  // weight is read here.
  void ReadRow(const GgufTensor& tensor, int64_t from, const Range& columns, const Target& to,
               int64_t to_row) {
    float* const out = to.data + to_row * to.cols;
    if (columns.size == tensor.row_elements) {
      return DequantizeRows(tensor, from, 1, {out, static_cast<size_t>(columns.size)});
    }
    row_.resize(static_cast<size_t>(tensor.row_elements));
    DequantizeRows(tensor, from, 1, row_);
    std::copy_n(row_.begin() + columns.begin, columns.size, out);
  }

  // The tensor, which must be [rows][cols]; a vector is [1][cols], or [rows][1] where
  // rows are asked for.
  absl::StatusOr<GgufTensor> Find(const std::string& name, int64_t rows, int64_t cols) {
    HW_ASSIGN_OR_RETURN(GgufTensor tensor, file_.GetTensor(name));
    used_.insert(tensor.name);
    if (cols == 1 && tensor.rows == 1) HW_RETURN_IF_ERROR(Stand(tensor));
    if (tensor.rows != rows || tensor.row_elements != cols) {
      return absl::InvalidArgumentError(Message("tensor '", tensor.name, "' is ", tensor.rows,
                                                " x ", tensor.row_elements, ", want ", rows, " x ",
                                                cols));
    }
    return tensor;
  }

  // A vector as rows of one element. No vector is quantised in files that are about.
  static absl::Status Stand(GgufTensor& tensor) {
    const TensorBlock block = *TensorBlockOf(tensor.type);
    if (block.elements != 1) {
      return absl::UnimplementedError(Message("tensor '", tensor.name, "' has type ",
                                              TensorTypeName(tensor.type),
                                              ", want one of F32, F16, BF16 for a vector"));
    }
    tensor.rows = tensor.row_elements;
    tensor.row_elements = 1;
    tensor.row_bytes = block.bytes;
    return absl::OkStatus();
  }

  absl::Status LoadVector(const std::string& name, const WeightMatrix& to) {
    return Fill(to, [&](const Target& target) {
      return LoadRows(name + ".weight", 1, {0, 1}, target, 0);
    });
  }

  absl::Status LoadVocabulary(const std::string& name, const WeightMatrix& to) {
    return Fill(to, [&](const Target& target) {
      return LoadRows(name + ".weight", config_.vocab_size, shard_.vocab, target, 0);
    });
  }

  // Rows `range` of the tensor, which has `rows`, to the target's from `first` on.
  absl::Status LoadRows(const std::string& name, int64_t rows, const Range& range, const Target& to,
                        int64_t first) {
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, Find(name, rows, to.cols));
    for (int64_t row = 0; row < range.size; ++row) {
      ReadRow(tensor, range.begin + row, {0, to.cols}, to, first + row);
    }
    return absl::OkStatus();
  }

  // Where rows 2i and 2i + 1 of a head are stored for a rotation that pairs rows i and
  // i + half, they return to halves.
  absl::Status LoadRotated(const std::string& name, int64_t rows, const Range& range,
                           const Target& to, int64_t first) {
    if (config_.rotary_rows == RotaryRows::kHalves) return LoadRows(name, rows, range, to, first);
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, Find(name, rows, to.cols));
    const int64_t half = config_.head_dim / 2;
    for (int64_t row = 0; row < range.size; ++row) {
      const int64_t in_head = row % config_.head_dim;
      const int64_t halves = row - in_head + in_head / 2 + (in_head % 2) * half;
      ReadRow(tensor, range.begin + row, {0, to.cols}, to, first + halves);
    }
    return absl::OkStatus();
  }

  // Columns `range` of all `rows` rows of `cols`.
  absl::Status LoadColumns(const std::string& name, int64_t rows, int64_t cols, const Range& range,
                           const Target& to) {
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor, Find(name, rows, cols));
    for (int64_t row = 0; row < rows; ++row) ReadRow(tensor, row, range, to, row);
    return absl::OkStatus();
  }

  absl::Status LoadRopeFactors(LlamaWeights& weights) {
    if (file_.FindTensor("rope_freqs.weight") == nullptr) {
      weights.rope_factors = RopeFactors(config_.rope_scaling, config_.head_dim, config_.rope_base);
      return absl::OkStatus();
    }
    HW_ASSIGN_OR_RETURN(const GgufTensor tensor,
                        Find("rope_freqs.weight", 1, config_.head_dim / 2));
    weights.rope_factors.resize(static_cast<size_t>(tensor.row_elements));
    DequantizeRows(tensor, 0, 1, weights.rope_factors);
    return absl::OkStatus();
  }

  // A tensor that nothing read would change the output if it were applied.
  absl::Status CheckNothingIsLeft() const {
    for (const std::string_view name : file_.TensorNames()) {
      if (used_.contains(name)) continue;
      return absl::UnimplementedError(
          Message("tensor '", name, "' is not a part of the models this runner computes"));
    }
    return absl::OkStatus();
  }

  const ModelFile& file_;
  const ModelConfig& config_;
  const RankShard& shard_;
  WeightSink& sink_;
  absl::flat_hash_set<std::string_view> used_;
  std::vector<float> row_;  // ReadRow()'s
};

}  // namespace

LlamaWeights LayOutLlamaWeights(const ModelConfig& config, const RankShard& shard,
                                const WeightFormat& format, int64_t& bytes) {
  LlamaWeights weights;
  ByteArena arena(format);
  LayOut(config, shard, arena, weights);
  bytes = arena.used();
  return weights;
}

absl::Status ReadLlamaWeights(const ModelFile& file, const ModelConfig& config,
                              const RankShard& shard, LlamaWeights& weights, WeightSink& sink) {
  return Loader(file, config, shard, sink).LoadAll(weights);
}

absl::StatusOr<LlamaWeights> LoadLlamaWeights(const ModelFile& file, const ModelConfig& config,
                                              const RankShard& shard, Backend& backend) {
  LlamaWeights weights;
  Arena arena;
  LayOut(config, shard, arena, weights);
  HW_ASSIGN_OR_RETURN(weights.memory,
                      backend.Allocate(arena.used() * static_cast<int64_t>(sizeof(float))));
  arena.SetMemory(weights.memory.As<float>().device_address());
  LayOut(config, shard, arena, weights);
  InPlace sink;
  HW_RETURN_IF_ERROR(ReadLlamaWeights(file, config, shard, weights, sink));
  return weights;
}

}  // namespace heavywater
