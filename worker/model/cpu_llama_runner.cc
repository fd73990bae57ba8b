#include "worker/model/cpu_llama_runner.h"

#include <algorithm>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/model/message.h"
#include "worker/model/vector_ops.h"

namespace heavywater {
namespace {

// Rows of logits computed at once: a vocabulary of 128,000 takes 32 MB, and the
// gather of 3 ranks as much again.
constexpr int64_t kLogitsTokens = 64;
constexpr int64_t kMaxBatchTokens = 1 << 16;
constexpr int64_t kAlignFloats = 16;  // a cache line

// Calls body(first, count) for chunks of at most `max` of `total` rows.
template <class Body>
absl::Status ForEachChunk(int64_t total, int64_t max, const Body& body) {
  for (int64_t first = 0; first < total; first += max) {
    HW_RETURN_IF_ERROR(body(first, std::min(max, total - first)));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CpuLlamaRunner>> CpuLlamaRunner::Create(
    const GgufFile& file, Communicator& comm, Backend& backend, const LlamaRunnerOptions& options) {
  if (options.max_batch_tokens < 1 || options.max_batch_tokens > kMaxBatchTokens) {
    return absl::InvalidArgumentError(
        Message("max_batch_tokens is ", options.max_batch_tokens, ", want 1 to ", kMaxBatchTokens));
  }
  HW_ASSIGN_OR_RETURN(auto matmul, Matmul::Create(backend, options.num_threads));
  HW_ASSIGN_OR_RETURN(const ModelConfig config, ReadModelConfig(file));
  HW_ASSIGN_OR_RETURN(const RankShard shard, MakeRankShard(config, comm.rank(), comm.size()));
  HW_ASSIGN_OR_RETURN(LlamaWeights weights, LoadLlamaWeights(file, config, shard, backend));
  std::unique_ptr<CpuLlamaRunner> runner(
      new CpuLlamaRunner(config, shard, std::move(weights), comm, options));
  runner->matmul_ = std::move(matmul);
  HW_RETURN_IF_ERROR(runner->AllocateWorkspace(backend));
  return runner;
}

CpuLlamaRunner::CpuLlamaRunner(ModelConfig config, RankShard shard, LlamaWeights weights,
                               Communicator& comm, const LlamaRunnerOptions& options)
    : config_(std::move(config)),
      shard_(shard),
      max_tokens_(options.max_batch_tokens),
      weights_(std::move(weights)),
      comm_(&comm),
      angles_(config_.head_dim, config_.rope_base, weights_.rope_factors) {}

int64_t CpuLlamaRunner::LayOutWorkspace(float* memory) {
  int64_t used = 0;
  const auto take = [&](int64_t rows, int64_t cols) {
    float* const part = memory == nullptr ? nullptr : memory + used;
    used += (rows * cols + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
    return part;
  };
  const int64_t padded = Matmul::PaddedTokens(max_tokens_);
  const int64_t logits_tokens = std::min(kLogitsTokens, max_tokens_);
  const LlamaLayer& layer = weights_.layers[0];
  workspace_.normed = take(padded, config_.hidden_size);
  workspace_.qkv = take(padded, layer.qkv.rows);
  workspace_.attention = take(padded, layer.attn_output.cols);
  workspace_.gate_up = take(padded, layer.gate_up.rows);
  workspace_.inner = take(padded, layer.ffn_down.cols);
  workspace_.partial = take(padded, config_.hidden_size);
  workspace_.logits = take(Matmul::PaddedTokens(logits_tokens), shard_.max_vocab);
  workspace_.gathered = take(shard_.size * logits_tokens, shard_.max_vocab);
  return used;
}

absl::Status CpuLlamaRunner::AllocateWorkspace(Backend& backend) {
  const int64_t floats = LayOutWorkspace(nullptr);
  HW_ASSIGN_OR_RETURN(workspace_memory_,
                      backend.Allocate(floats * static_cast<int64_t>(sizeof(float))));
  LayOutWorkspace(workspace_memory_.As<float>().device_address());
  const auto reserve = [&](const WeightMatrix& weights, int64_t tokens, int64_t out_stride) {
    return matmul_->Reserve(weights.rows, weights.cols, tokens, out_stride);
  };
  const LlamaLayer& layer = weights_.layers[0];  // all are alike
  HW_RETURN_IF_ERROR(reserve(layer.qkv, max_tokens_, layer.qkv.rows));
  HW_RETURN_IF_ERROR(reserve(layer.attn_output, max_tokens_, config_.hidden_size));
  HW_RETURN_IF_ERROR(reserve(layer.gate_up, max_tokens_, layer.gate_up.rows));
  HW_RETURN_IF_ERROR(reserve(layer.ffn_down, max_tokens_, config_.hidden_size));
  return reserve(weights_.output, std::min(kLogitsTokens, max_tokens_), shard_.max_vocab);
}

int64_t CpuLlamaRunner::device_bytes() const {
  return weights_.memory.bytes() + workspace_memory_.bytes() + matmul_->device_bytes();
}

void CpuLlamaRunner::SetCommunicator(Communicator& comm) {
  HW_CHECK(comm.rank() == shard_.rank && comm.size() == shard_.size);
  comm_ = &comm;
}

absl::Status CpuLlamaRunner::Embed(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                                   Stream& stream) {
  const int64_t width = config_.hidden_size;
  HW_CHECK(hidden.size() == static_cast<int64_t>(tokens.size()) * width);
  for (const int32_t token : tokens) {
    if (token >= 0 && token < config_.vocab_size) continue;
    return absl::InvalidArgumentError(
        Message("token is ", token, ", want 0 or more and less than ", config_.vocab_size));
  }
  float* out = hidden.device_address();
  for (const int32_t token : tokens) {
    const int64_t row = token - shard_.vocab.begin;
    if (row >= 0 && row < shard_.vocab.size) {
      std::copy_n(weights_.embedding.row(row), width, out);
    } else {
      std::fill_n(out, width, 0.0f);  // another rank has it
    }
    out += width;
  }
  return ForEachChunk(
      static_cast<int64_t>(tokens.size()), max_tokens_, [&](int64_t first, int64_t count) {
        return comm_->AllReduceSum(hidden.Sub(first * width, count * width), stream);
      });
}

absl::Status CpuLlamaRunner::ComputeQkv(int layer, DeviceSpan<const float> hidden,
                                        std::span<const Position> positions, DeviceSpan<float> q,
                                        DeviceSpan<float> k, DeviceSpan<float> v, Stream&) {
  const auto tokens = static_cast<int64_t>(positions.size());
  const int64_t q_width = shard_.query_heads.size * config_.head_dim;
  const int64_t kv_width = shard_.kv_heads.size * config_.head_dim;
  HW_CHECK(layer >= 0 && layer < config_.num_layers);
  HW_CHECK(hidden.size() == tokens * config_.hidden_size && q.size() == tokens * q_width);
  HW_CHECK(k.size() == tokens * kv_width && v.size() == tokens * kv_width);
  return ForEachChunk(tokens, max_tokens_, [&](int64_t first, int64_t count) {
    return QkvChunk(weights_.layers[static_cast<size_t>(layer)],
                    hidden.device_address() + first * config_.hidden_size,
                    positions.subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
                    q.device_address() + first * q_width, k.device_address() + first * kv_width,
                    v.device_address() + first * kv_width);
  });
}

absl::Status CpuLlamaRunner::QkvChunk(const LlamaLayer& layer, const float* hidden,
                                      std::span<const Position> positions, float* q, float* k,
                                      float* v) {
  const auto tokens = static_cast<int64_t>(positions.size());
  const int64_t head_dim = config_.head_dim;
  const int64_t q_width = shard_.query_heads.size * head_dim;
  const int64_t kv_width = shard_.kv_heads.size * head_dim;
  Normalise(hidden, tokens, layer.attn_norm);
  HW_RETURN_IF_ERROR(
      Multiply(layer.qkv, workspace_.normed, tokens, workspace_.qkv, layer.qkv.rows));
  angles_.SetPositions(positions);
  const auto rotate = [&](const float* from, int64_t width, int64_t token, float* to) {
    for (int64_t i = 0; i < width; i += head_dim) {
      RotateHalves(from + i, angles_.cosines(token), angles_.sines(token), angles_.half(), to + i);
    }
  };
  for (int64_t t = 0; t < tokens; ++t) {
    const float* row = workspace_.qkv + t * layer.qkv.rows;
    rotate(row, q_width, t, q + t * q_width);
    rotate(row + q_width, kv_width, t, k + t * kv_width);
    std::copy_n(row + q_width + kv_width, kv_width, v + t * kv_width);
  }
  return absl::OkStatus();
}

absl::Status CpuLlamaRunner::FinishLayer(int layer, DeviceSpan<const float> attention,
                                         DeviceSpan<float> hidden, Stream& stream) {
  HW_CHECK(layer >= 0 && layer < config_.num_layers);
  const LlamaLayer& weights = weights_.layers[static_cast<size_t>(layer)];
  const int64_t width = config_.hidden_size;
  const int64_t tokens = hidden.size() / width;
  HW_CHECK(hidden.size() == tokens * width);
  HW_CHECK(attention.size() == tokens * weights.attn_output.cols);
  return ForEachChunk(tokens, max_tokens_, [&](int64_t first, int64_t count) {
    float* const rows = hidden.device_address() + first * width;
    HW_RETURN_IF_ERROR(AttentionChunk(weights,
                                      attention.device_address() + first * weights.attn_output.cols,
                                      count, rows, stream));
    return FeedForwardChunk(weights, count, rows, stream);
  });
}

absl::Status CpuLlamaRunner::AttentionChunk(const LlamaLayer& layer, const float* attention,
                                            int64_t tokens, float* hidden, Stream& stream) {
  const float* x = attention;
  if (Matmul::PaddedTokens(tokens) != tokens) {  // the caller's rows have no padding
    std::copy_n(attention, tokens * layer.attn_output.cols, workspace_.attention);
    x = workspace_.attention;
  }
  HW_RETURN_IF_ERROR(
      Multiply(layer.attn_output, x, tokens, workspace_.partial, config_.hidden_size));
  return AddPartials(tokens, hidden, stream);
}

absl::Status CpuLlamaRunner::FeedForwardChunk(const LlamaLayer& layer, int64_t tokens,
                                              float* hidden, Stream& stream) {
  const int64_t ffn = layer.ffn_down.cols;
  Normalise(hidden, tokens, layer.ffn_norm);
  HW_RETURN_IF_ERROR(
      Multiply(layer.gate_up, workspace_.normed, tokens, workspace_.gate_up, layer.gate_up.rows));
  for (int64_t t = 0; t < tokens; ++t) {
    const float* gate = workspace_.gate_up + t * 2 * ffn;
    SiluMultiply(gate, gate + ffn, ffn, workspace_.inner + t * ffn);
  }
  HW_RETURN_IF_ERROR(
      Multiply(layer.ffn_down, workspace_.inner, tokens, workspace_.partial, config_.hidden_size));
  return AddPartials(tokens, hidden, stream);
}

absl::Status CpuLlamaRunner::ComputeLogits(DeviceSpan<const float> hidden, DeviceSpan<float> logits,
                                           Stream& stream) {
  const int64_t tokens = hidden.size() / config_.hidden_size;
  HW_CHECK(hidden.size() == tokens * config_.hidden_size);
  HW_CHECK(logits.size() == tokens * config_.vocab_size);
  return ForEachChunk(
      tokens, std::min(kLogitsTokens, max_tokens_), [&](int64_t first, int64_t count) {
        return LogitsChunk(hidden.device_address() + first * config_.hidden_size, count,
                           logits.device_address() + first * config_.vocab_size, stream);
      });
}

absl::Status CpuLlamaRunner::LogitsChunk(const float* hidden, int64_t tokens, float* logits,
                                         Stream& stream) {
  const int64_t part = tokens * shard_.max_vocab;  // every rank sends so much
  Normalise(hidden, tokens, weights_.output_norm);
  HW_RETURN_IF_ERROR(
      Multiply(weights_.output, workspace_.normed, tokens, workspace_.logits, shard_.max_vocab));
  HW_RETURN_IF_ERROR(comm_->AllGather(DeviceSpan<const float>(workspace_.logits, part),
                                      DeviceSpan<float>(workspace_.gathered, part * shard_.size),
                                      stream));
  for (int rank = 0; rank < shard_.size; ++rank) {
    const Range range = SplitInUnits(config_.vocab_size, rank, shard_.size);
    for (int64_t t = 0; t < tokens; ++t) {
      std::copy_n(workspace_.gathered + rank * part + t * shard_.max_vocab, range.size,
                  logits + t * config_.vocab_size + range.begin);
    }
  }
  return absl::OkStatus();
}

void CpuLlamaRunner::Normalise(const float* hidden, int64_t tokens, const WeightMatrix& weight) {
  const int64_t width = config_.hidden_size;
  for (int64_t t = 0; t < tokens; ++t) {
    RmsNorm(hidden + t * width, weight.data, static_cast<float>(config_.rms_epsilon), width,
            workspace_.normed + t * width);
  }
}

absl::Status CpuLlamaRunner::AddPartials(int64_t tokens, float* hidden, Stream& stream) {
  const int64_t size = tokens * config_.hidden_size;
  HW_RETURN_IF_ERROR(comm_->AllReduceSum(DeviceSpan<float>(workspace_.partial, size), stream));
  AddTo(workspace_.partial, size, hidden);
  return absl::OkStatus();
}

absl::Status CpuLlamaRunner::Multiply(const WeightMatrix& weights, const float* x, int64_t tokens,
                                      float* out, int64_t out_stride) {
  return matmul_->Run({.weights = weights.data,
                       .rows = weights.rows,
                       .cols = weights.cols,
                       .x = x,
                       .tokens = tokens,
                       .out = out,
                       .out_stride = out_stride});
}

}  // namespace heavywater
