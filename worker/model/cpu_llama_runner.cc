#include "worker/model/cpu_llama_runner.h"

#include <algorithm>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/model/message.h"
#include "worker/model/vector_ops.h"

namespace heavywater {
namespace {

constexpr int64_t kAlignFloats = 16;  // a cache line

}  // namespace

absl::StatusOr<std::unique_ptr<CpuLlamaRunner>> CpuLlamaRunner::Create(
    const ModelFile& file, Communicator& comm, Backend& backend,
    const LlamaRunnerOptions& options) {
  HW_RETURN_IF_ERROR(CheckMaxBatch(options.max_batch_tokens));
  HW_ASSIGN_OR_RETURN(auto matmul, Matmul::Create(backend, options.num_threads));
  HW_ASSIGN_OR_RETURN(const ModelConfig config, file.ReadConfig());
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
    : LlamaRunner(std::move(config), shard, std::move(weights), comm, options.max_batch_tokens),
      angles_(this->config().head_dim, this->config().rope_base, this->weights().rope_factors,
              RopeMagnitude(this->config().rope_scaling)) {}

int64_t CpuLlamaRunner::LayOutWorkspace(float* memory) {
  int64_t used = 0;
  const auto take = [&](int64_t rows, int64_t cols) {
    float* const part = memory == nullptr ? nullptr : memory + used;
    used += (rows * cols + kAlignFloats - 1) / kAlignFloats * kAlignFloats;
    return part;
  };
  const int64_t padded = Matmul::PaddedTokens(max_tokens());
  const int64_t logits_tokens = max_logits_tokens();
  const LlamaLayer& layer = weights().layers[0];
  workspace_.normed = take(padded, config().hidden_size);
  workspace_.qkv = take(padded, layer.qkv.rows);
  workspace_.attention = take(padded, layer.attn_output.cols);
  workspace_.gate_up = take(padded, layer.gate_up.rows);
  workspace_.inner = take(padded, layer.ffn_down.cols);
  workspace_.partial = take(padded, config().hidden_size);
  workspace_.logits = take(Matmul::PaddedTokens(logits_tokens), shard().max_vocab);
  workspace_.gathered = take(shard().size * logits_tokens, shard().max_vocab);
  return used;
}

absl::Status CpuLlamaRunner::AllocateWorkspace(Backend& backend) {
  const int64_t floats = LayOutWorkspace(nullptr);
  HW_ASSIGN_OR_RETURN(workspace_memory_,
                      backend.Allocate(floats * static_cast<int64_t>(sizeof(float))));
  LayOutWorkspace(workspace_memory_.As<float>().device_address());
  exchange().partial = {workspace_.partial, max_tokens() * config().hidden_size};
  exchange().logits = {workspace_.logits, max_logits_tokens() * shard().max_vocab};
  exchange().gathered = {workspace_.gathered, shard().size * exchange().logits.size()};
  return ReserveMatrices();
}

absl::Status CpuLlamaRunner::ReserveMatrices() {
  const auto reserve = [&](const WeightMatrix& weights, int64_t tokens, int64_t out_stride) {
    return matmul_->Reserve({.codec = weights.codec,
                             .rows = weights.rows,
                             .cols = weights.cols,
                             .tokens = tokens,
                             .out_stride = out_stride});
  };
  for (const LlamaLayer& layer : weights().layers) {  // of one shape; codecs may differ
    HW_RETURN_IF_ERROR(reserve(layer.qkv, max_tokens(), layer.qkv.rows));
    HW_RETURN_IF_ERROR(reserve(layer.attn_output, max_tokens(), config().hidden_size));
    HW_RETURN_IF_ERROR(reserve(layer.gate_up, max_tokens(), layer.gate_up.rows));
    HW_RETURN_IF_ERROR(reserve(layer.ffn_down, max_tokens(), config().hidden_size));
  }
  return reserve(weights().output, max_logits_tokens(), shard().max_vocab);
}

int64_t CpuLlamaRunner::device_bytes() const {
  return weights().memory.bytes() + workspace_memory_.bytes() + matmul_->device_bytes();
}

absl::Status CpuLlamaRunner::EmbedChunk(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                                        Stream&) {
  const int64_t width = config().hidden_size;
  float* out = hidden.device_address();
  for (const int32_t token : tokens) {
    const int64_t row = token - shard().vocab.begin;
    if (row >= 0 && row < shard().vocab.size) {
      UnpackRows(weights().embedding.row(row), weights().embedding.codec, 1, width, out);
    } else {
      std::fill_n(out, width, 0.0f);  // another rank has it
    }
    out += width;
  }
  return absl::OkStatus();
}

absl::Status CpuLlamaRunner::QkvChunk(const LlamaLayer& layer, DeviceSpan<const float> hidden,
                                      std::span<const Position> positions, DeviceSpan<float> q,
                                      DeviceSpan<float> k, DeviceSpan<float> v, Stream&) {
  const auto tokens = static_cast<int64_t>(positions.size());
  const int64_t head_dim = config().head_dim;
  Normalise(hidden.device_address(), tokens, layer.attn_norm);
  HW_RETURN_IF_ERROR(
      Multiply(layer.qkv, workspace_.normed, tokens, workspace_.qkv, layer.qkv.rows));
  angles_.SetPositions(positions);
  const auto rotate = [&](const float* from, int64_t width, int64_t token, float* to) {
    for (int64_t i = 0; i < width; i += head_dim) {
      RotateHalves(from + i, angles_.cosines(token), angles_.sines(token), angles_.half(), to + i);
    }
  };
  for (int64_t t = 0; t < tokens; ++t) {
    float* const row = workspace_.qkv + t * layer.qkv.rows;
    PrepareQkv(layer, row);
    rotate(row, q_width(), t, q.device_address() + t * q_width());
    rotate(row + q_width(), kv_width(), t, k.device_address() + t * kv_width());
    std::copy_n(row + q_width() + kv_width(), kv_width(), v.device_address() + t * kv_width());
  }
  return absl::OkStatus();
}

void CpuLlamaRunner::PrepareQkv(const LlamaLayer& layer, float* row) const {
  if (layer.qkv_bias.exists()) AddTo(layer.qkv_bias.floats(), layer.qkv_bias.cols, row);
  if (!layer.q_norm.exists()) return;
  const int64_t head_dim = config().head_dim;
  const auto epsilon = static_cast<float>(config().rms_epsilon);
  for (int64_t i = 0; i < q_width() + kv_width(); i += head_dim) {
    const WeightMatrix& norm = i < q_width() ? layer.q_norm : layer.k_norm;
    RmsNorm(row + i, norm.floats(), epsilon, head_dim, row + i);
  }
}

absl::Status CpuLlamaRunner::AttentionChunk(const LlamaLayer& layer,
                                            DeviceSpan<const float> attention, int64_t tokens,
                                            Stream&) {
  const float* x = attention.device_address();
  if (Matmul::PaddedTokens(tokens) != tokens) {  // the caller's rows have no padding
    std::copy_n(x, attention.size(), workspace_.attention);
    x = workspace_.attention;
  }
  return Multiply(layer.attn_output, x, tokens, workspace_.partial, config().hidden_size);
}

absl::Status CpuLlamaRunner::FeedForwardChunk(const LlamaLayer& layer,
                                              DeviceSpan<const float> hidden, int64_t tokens,
                                              Stream&) {
  const int64_t ffn = layer.ffn_down.cols;
  Normalise(hidden.device_address(), tokens, layer.ffn_norm);
  HW_RETURN_IF_ERROR(
      Multiply(layer.gate_up, workspace_.normed, tokens, workspace_.gate_up, layer.gate_up.rows));
  for (int64_t t = 0; t < tokens; ++t) {
    const float* gate = workspace_.gate_up + t * 2 * ffn;
    SiluMultiply(gate, gate + ffn, ffn, workspace_.inner + t * ffn);
  }
  return Multiply(layer.ffn_down, workspace_.inner, tokens, workspace_.partial,
                  config().hidden_size);
}

absl::Status CpuLlamaRunner::AddPartial(DeviceSpan<float> hidden, Stream&) {
  AddTo(workspace_.partial, hidden.size(), hidden.device_address());
  return absl::OkStatus();
}

absl::Status CpuLlamaRunner::LogitsChunk(DeviceSpan<const float> hidden, int64_t tokens, Stream&) {
  Normalise(hidden.device_address(), tokens, weights().output_norm);
  return Multiply(weights().output, workspace_.normed, tokens, workspace_.logits,
                  shard().max_vocab);
}

absl::Status CpuLlamaRunner::PlaceLogits(int64_t tokens, DeviceSpan<float> logits, Stream&) {
  const int64_t vocab = config().vocab_size;
  const float* from = workspace_.gathered;
  for (int rank = 0; rank < shard().size; ++rank) {
    const Range range = SplitInUnits(vocab, rank, shard().size);
    for (int64_t t = 0; t < tokens; ++t) {
      std::copy_n(from, range.size, logits.device_address() + t * vocab + range.begin);
      from += shard().max_vocab;
    }
  }
  return absl::OkStatus();
}

void CpuLlamaRunner::Normalise(const float* hidden, int64_t tokens, const WeightMatrix& weight) {
  const int64_t width = config().hidden_size;
  for (int64_t t = 0; t < tokens; ++t) {
    RmsNorm(hidden + t * width, weight.floats(), static_cast<float>(config().rms_epsilon), width,
            workspace_.normed + t * width);
  }
}

absl::Status CpuLlamaRunner::Multiply(const WeightMatrix& weights, const float* x, int64_t tokens,
                                      float* out, int64_t out_stride) {
  return matmul_->Run({.weights = weights.data,
                       .codec = weights.codec,
                       .rows = weights.rows,
                       .cols = weights.cols,
                       .x = x,
                       .tokens = tokens,
                       .out = out,
                       .out_stride = out_stride});
}

}  // namespace heavywater
