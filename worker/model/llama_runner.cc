#include "worker/model/llama_runner.h"

#include <algorithm>
#include <utility>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "cache_service/base/step_phases.h"
#include "worker/model/message.h"
#include "worker/model/rope_angles.h"

namespace heavywater {
namespace {

constexpr int64_t kMaxBatchTokens = 1 << 16;

// Calls body(first, count) for chunks of at most `max` of `total` rows.
template <class Body>
absl::Status ForEachChunk(int64_t total, int64_t max, const Body& body) {
  for (int64_t first = 0; first < total; first += max) {
    HW_RETURN_IF_ERROR(body(first, std::min(max, total - first)));
  }
  return absl::OkStatus();
}

// Rows [first, first + count) of [rows][width].
template <typename T>
DeviceSpan<T> Rows(DeviceSpan<T> rows, int64_t width, int64_t first, int64_t count) {
  return rows.Sub(first * width, count * width);
}

}  // namespace

absl::Status LlamaRunner::CheckMaxBatch(int64_t max_batch_tokens) {
  if (max_batch_tokens >= 1 && max_batch_tokens <= kMaxBatchTokens) return absl::OkStatus();
  return absl::InvalidArgumentError(
      Message("max_batch_tokens is ", max_batch_tokens, ", want 1 to ", kMaxBatchTokens));
}

LlamaRunner::LlamaRunner(ModelConfig config, RankShard shard, LlamaWeights weights,
                         Communicator& comm, int64_t max_batch_tokens)
    : config_(std::move(config)),
      shard_(shard),
      max_tokens_(max_batch_tokens),
      weights_(std::move(weights)),
      comm_(&comm) {}

int64_t LlamaRunner::max_logits_tokens() const { return std::min(kLogitsTokens, max_tokens_); }

std::vector<double> LlamaRunner::RopeFrequencies() const {
  return RopeAngles(config_.head_dim, config_.rope_base, weights_.rope_factors).frequencies();
}

void LlamaRunner::SetCommunicator(Communicator& comm) {
  HW_CHECK(comm.rank() == shard_.rank && comm.size() == shard_.size);
  comm_ = &comm;
}

absl::Status LlamaRunner::Embed(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                                Stream& stream) {
  const StepPhaseScope phase(StepPhase::kMatrices);
  const int64_t width = config_.hidden_size;
  HW_CHECK(hidden.size() == static_cast<int64_t>(tokens.size()) * width);
  for (const int32_t token : tokens) {
    if (token >= 0 && token < config_.vocab_size) continue;
    return absl::InvalidArgumentError(
        Message("token is ", token, ", want 0 or more and less than ", config_.vocab_size));
  }
  return ForEachChunk(
      static_cast<int64_t>(tokens.size()), max_tokens_, [&](int64_t first, int64_t count) {
        const DeviceSpan<float> rows = Rows(hidden, width, first, count);
        HW_RETURN_IF_ERROR(EmbedChunk(
            tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(count)), rows, stream));
        const StepPhaseScope reduce(StepPhase::kReduce);
        return comm_->AllReduceSum(rows, stream);
      });
}

absl::Status LlamaRunner::ComputeQkv(int layer, DeviceSpan<const float> hidden,
                                     std::span<const Position> positions, DeviceSpan<float> q,
                                     DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) {
  const StepPhaseScope phase(StepPhase::kMatrices);
  const auto tokens = static_cast<int64_t>(positions.size());
  HW_CHECK(layer >= 0 && layer < config_.num_layers);
  HW_CHECK(hidden.size() == tokens * config_.hidden_size && q.size() == tokens * q_width());
  HW_CHECK(k.size() == tokens * kv_width() && v.size() == tokens * kv_width());
  return ForEachChunk(tokens, max_tokens_, [&](int64_t first, int64_t count) {
    return QkvChunk(weights_.layers[static_cast<size_t>(layer)],
                    Rows(hidden, config_.hidden_size, first, count),
                    positions.subspan(static_cast<size_t>(first), static_cast<size_t>(count)),
                    Rows(q, q_width(), first, count), Rows(k, kv_width(), first, count),
                    Rows(v, kv_width(), first, count), stream);
  });
}

absl::Status LlamaRunner::FinishLayer(int layer, DeviceSpan<const float> attention,
                                      DeviceSpan<float> hidden, Stream& stream) {
  const StepPhaseScope phase(StepPhase::kMatrices);
  HW_CHECK(layer >= 0 && layer < config_.num_layers);
  const LlamaLayer& weights = weights_.layers[static_cast<size_t>(layer)];
  const int64_t width = config_.hidden_size;
  const int64_t tokens = hidden.size() / width;
  HW_CHECK(hidden.size() == tokens * width);
  HW_CHECK(attention.size() == tokens * q_width());
  return ForEachChunk(tokens, max_tokens_, [&](int64_t first, int64_t count) {
    const DeviceSpan<float> rows = Rows(hidden, width, first, count);
    HW_RETURN_IF_ERROR(
        AttentionChunk(weights, Rows(attention, q_width(), first, count), count, stream));
    HW_RETURN_IF_ERROR(ReducePartial(rows, stream));
    HW_RETURN_IF_ERROR(FeedForwardChunk(weights, rows, count, stream));
    return ReducePartial(rows, stream);
  });
}

// hidden += the sum of all ranks' partial.
absl::Status LlamaRunner::ReducePartial(DeviceSpan<float> hidden, Stream& stream) {
  {
    const StepPhaseScope reduce(StepPhase::kReduce);
    HW_RETURN_IF_ERROR(comm_->AllReduceSum(exchange_.partial.Sub(0, hidden.size()), stream));
  }
  return AddPartial(hidden, stream);
}

absl::Status LlamaRunner::ComputeLogits(DeviceSpan<const float> hidden, DeviceSpan<float> logits,
                                        Stream& stream) {
  const StepPhaseScope phase(StepPhase::kMatrices);
  const int64_t tokens = hidden.size() / config_.hidden_size;
  HW_CHECK(hidden.size() == tokens * config_.hidden_size);
  HW_CHECK(logits.size() == tokens * config_.vocab_size);
  return ForEachChunk(tokens, max_logits_tokens(), [&](int64_t first, int64_t count) {
    const int64_t part = count * shard_.max_vocab;  // every rank sends so much
    HW_RETURN_IF_ERROR(LogitsChunk(Rows(hidden, config_.hidden_size, first, count), count, stream));
    HW_RETURN_IF_ERROR(GatherLogits(part, stream));
    return PlaceLogits(count, Rows(logits, config_.vocab_size, first, count), stream);
  });
}

absl::Status LlamaRunner::GatherLogits(int64_t count, Stream& stream) {
  const StepPhaseScope phase(StepPhase::kReduce);
  return comm_->AllGather(DeviceSpan<const float>(exchange_.logits.Sub(0, count)),
                          exchange_.gathered.Sub(0, count * shard_.size), stream);
}

}  // namespace heavywater
