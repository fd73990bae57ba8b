#include "tests/worker/model/full_cache_decoder.h"

#include <algorithm>
#include <cmath>

#include "cache_service/base/status.h"

namespace heavywater {
namespace {

// Device rows of float32 with a host copy.
class Rows {
 public:
  static absl::StatusOr<Rows> Create(Backend& backend, int64_t size) {
    Rows rows;
    HW_ASSIGN_OR_RETURN(rows.buffer_, backend.Allocate(size * static_cast<int64_t>(sizeof(float))));
    rows.span_ = rows.buffer_.As<float>(0, size);
    return rows;
  }

  DeviceSpan<float> span() const { return span_; }

  absl::StatusOr<std::vector<float>> ToHost(Backend& backend, Stream& stream) const {
    std::vector<float> host(static_cast<size_t>(span_.size()));
    HW_RETURN_IF_ERROR(backend.CopyToHost(std::as_writable_bytes(std::span(host)),
                                          buffer_.As<std::byte>(0, span_.size_bytes()), stream));
    HW_RETURN_IF_ERROR(backend.Synchronize(stream));
    return host;
  }

  absl::Status FromHost(Backend& backend, std::span<const float> host, Stream& stream) const {
    return backend.CopyToDevice(buffer_.As<std::byte>(0, span_.size_bytes()), std::as_bytes(host),
                                stream);
  }

 private:
  DeviceBuffer buffer_;
  DeviceSpan<float> span_;
};

// Eight sums side by side, so that the compiler can use vectors.
float Dot(const float* a, const float* b, int64_t size) {
  float sums[8] = {};
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    for (int lane = 0; lane < 8; ++lane) sums[lane] += a[i + lane] * b[i + lane];
  }
  for (; i < size; ++i) sums[0] += a[i] * b[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

}  // namespace

FullCacheDecoder::FullCacheDecoder(Model& model, const KvShape& shape, Backend& backend)
    : model_(model),
      shape_(shape),
      backend_(backend),
      layers_(static_cast<size_t>(shape.num_layers)) {}

absl::StatusOr<std::vector<float>> FullCacheDecoder::Feed(std::span<const int32_t> tokens,
                                                          bool last_only) {
  const auto count = static_cast<int64_t>(tokens.size());
  const int64_t q_width = int64_t{shape_.num_query_heads} * shape_.head_dim;
  const int64_t kv_width = int64_t{shape_.num_kv_heads} * shape_.head_dim;
  HW_ASSIGN_OR_RETURN(const Rows hidden, Rows::Create(backend_, count * model_.hidden_size()));
  HW_ASSIGN_OR_RETURN(const Rows q, Rows::Create(backend_, count * q_width));
  HW_ASSIGN_OR_RETURN(const Rows k, Rows::Create(backend_, count * kv_width));
  HW_ASSIGN_OR_RETURN(const Rows v, Rows::Create(backend_, count * kv_width));
  std::vector<Position> positions;
  for (int64_t i = 0; i < count; ++i) {
    positions.push_back(static_cast<Position>(num_positions_ + i));
  }
  HW_RETURN_IF_ERROR(model_.Embed(tokens, hidden.span(), stream_));
  for (int layer = 0; layer < shape_.num_layers; ++layer) {
    HW_RETURN_IF_ERROR(
        model_.ComputeQkv(layer, hidden.span(), positions, q.span(), k.span(), v.span(), stream_));
    LayerCache& cache = layers_[static_cast<size_t>(layer)];
    HW_ASSIGN_OR_RETURN(const auto queries, q.ToHost(backend_, stream_));
    HW_ASSIGN_OR_RETURN(const auto keys, k.ToHost(backend_, stream_));
    HW_ASSIGN_OR_RETURN(const auto values, v.ToHost(backend_, stream_));
    cache.keys.insert(cache.keys.end(), keys.begin(), keys.end());
    cache.values.insert(cache.values.end(), values.begin(), values.end());
    HW_RETURN_IF_ERROR(q.FromHost(backend_, Attend(cache, queries, num_positions_), stream_));
    HW_RETURN_IF_ERROR(model_.FinishLayer(layer, q.span(), hidden.span(), stream_));
  }
  num_positions_ += count;
  const int64_t wanted = last_only ? 1 : count;
  HW_ASSIGN_OR_RETURN(const Rows logits, Rows::Create(backend_, wanted * model_.vocab_size()));
  HW_RETURN_IF_ERROR(model_.ComputeLogits(
      hidden.span().Sub((count - wanted) * model_.hidden_size(), wanted * model_.hidden_size()),
      logits.span(), stream_));
  return logits.ToHost(backend_, stream_);
}

std::vector<float> FullCacheDecoder::Attend(const LayerCache& cache, std::span<const float> queries,
                                            int64_t first) const {
  const int64_t dim = shape_.head_dim;
  const int64_t kv_width = shape_.num_kv_heads * dim;
  const int64_t heads = shape_.num_query_heads;
  const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
  std::vector<float> out(queries.size());
  std::vector<float> weights;
  for (int64_t row = 0; row * dim < static_cast<int64_t>(queries.size()); ++row) {
    const int64_t visible = first + row / heads + 1;
    const int64_t kv_at = row % heads / shape_.group_size() * dim;
    const float* q = queries.data() + row * dim;
    float* to = out.data() + row * dim;
    weights.assign(static_cast<size_t>(visible), 0);
    float highest = -INFINITY;
    for (int64_t t = 0; t < visible; ++t) {
      const float* key = cache.keys.data() + t * kv_width + kv_at;
      weights[static_cast<size_t>(t)] = Dot(q, key, dim) * scale;
      highest = std::max(highest, weights[static_cast<size_t>(t)]);
    }
    float total = 0;
    for (float& weight : weights) total += weight = std::exp(weight - highest);
    for (int64_t t = 0; t < visible; ++t) {
      const float* value = cache.values.data() + t * kv_width + kv_at;
      const float share = weights[static_cast<size_t>(t)] / total;
      for (int64_t i = 0; i < dim; ++i) to[i] += share * value[i];
    }
  }
  return out;
}

}  // namespace heavywater
