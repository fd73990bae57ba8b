// The oracle: attention as the formula reads, scalar, in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cache_service/base/bfloat16.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/backend.h"
#include "worker/backend/host_memory.h"
#include "worker/policy/selection.h"

namespace heavywater {
namespace {

constexpr double kFixedPointOne = 4294967296.0;  // 2^32

double Element(const std::byte* row, int i, KvDtype dtype) {
  if (dtype == KvDtype::kFloat32) return reinterpret_cast<const float*>(row)[i];
  return BFloat16ToFloat(reinterpret_cast<const uint16_t*>(row)[i]);
}

// One query head over one KV head's slots.
struct Query {
  const KvShape& shape;
  KvHeadRows rows;
  const float* query;          // [head_dim]
  std::vector<int64_t> slots;  // those it may see
  double scale;
};

std::vector<double> Probabilities(const Query& q) {
  std::vector<double> weights;
  double maximum = -std::numeric_limits<double>::infinity();
  for (const int64_t slot : q.slots) {
    double dot = 0;
    for (int i = 0; i < q.shape.head_dim; ++i) {
      dot += q.query[i] * Element(q.rows.Key(slot), i, q.shape.dtype);
    }
    weights.push_back(dot * q.scale);
    maximum = std::max(maximum, weights.back());
  }
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - maximum);
  for (double& weight : weights) weight /= sum;
  return weights;
}

// Writes the output row; `gains` (may be null) is the KV head's, by slot.
void AttendQuery(const Query& q, float* out, int64_t* gains) {
  const std::vector<double> probabilities = Probabilities(q);
  for (int i = 0; i < q.shape.head_dim; ++i) {
    double sum = 0;
    for (size_t k = 0; k < q.slots.size(); ++k) {
      sum += probabilities[k] * Element(q.rows.Value(q.slots[k]), i, q.shape.dtype);
    }
    out[i] = static_cast<float>(sum);
  }
  if (gains == nullptr) return;
  for (size_t k = 0; k < q.slots.size(); ++k) {
    gains[q.slots[k]] += std::llrint(probabilities[k] * kFixedPointOne);
  }
}

std::vector<int64_t> VisibleSlots(const LayerView& layer, int set, Position query_position) {
  const Position* positions = layer.positions.device_address() + set * layer.capacity;
  std::vector<int64_t> slots;
  for (int64_t slot = 0; slot < layer.used; ++slot) {
    if (positions[slot] != kNoPosition && positions[slot] <= query_position) slots.push_back(slot);
  }
  return slots;
}

class ReferenceBackend final : public HostMemoryBackend {
 public:
  std::string Name() const override { return "reference"; }

  absl::Status Attend(const KvShape& shape, const AttendParams& params, Stream& stream) override {
    HW_RETURN_IF_ERROR(CheckBackendShape(shape));
    for (const AttendItem& item : params.items) {
      for (int64_t token = 0; token < item.num_tokens; ++token) {
        const auto position = static_cast<Position>(item.first_position + token);
        for (int head = 0; head < shape.num_query_heads; ++head) {
          const int kv_head = head / shape.group_size();
          const int64_t row = (item.first_token + token) * shape.num_query_heads + head;
          const Query query{
              .shape = shape,
              .rows = RowsOfKvHead(shape, item.layer, kv_head),
              .query = params.queries.device_address() + row * shape.head_dim,
              .slots = VisibleSlots(item.layer, SetOfKvHead(item.layer, kv_head), position),
              .scale = params.scale};
          AttendQuery(query, params.out.device_address() + row * shape.head_dim,
                      item.accumulate_gains ? GainsOf(item.layer, kv_head) : nullptr);
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status AttendPrompt(const KvShape& shape, const PromptParams& params,
                            Stream& stream) override {
    HW_RETURN_IF_ERROR(CheckBackendShape(shape));
    for (int64_t token = 0; token < params.num_tokens; ++token) {
      const int64_t position = params.first_position + token;
      HW_CHECK(position < params.layer.capacity);
      for (int head = 0; head < shape.num_query_heads; ++head) {
        const int kv_head = head / shape.group_size();
        const int64_t row = token * shape.num_query_heads + head;
        Query query{.shape = shape,
                    .rows = RowsOfKvHead(shape, params.layer, kv_head),
                    .query = params.queries.device_address() + row * shape.head_dim,
                    .slots = {},
                    .scale = params.scale};
        for (int64_t slot = 0; slot <= position; ++slot) query.slots.push_back(slot);
        AttendQuery(query, params.out.device_address() + row * shape.head_dim,
                    position >= params.score_from ? GainsOf(params.layer, kv_head) : nullptr);
      }
    }
    return absl::OkStatus();
  }

  absl::Status Select(const SelectParams& params, Stream& stream) override {
    for (int set = 0; set < params.num_sets; ++set) {
      const auto count = static_cast<size_t>(params.count);
      const Candidates candidates{
          .positions = {params.positions.device_address() + set * params.stride, count},
          .scores = {params.scores.device_address() + set * params.stride, count}};
      uint8_t* kept = params.kept.device_address() + set * params.count;
      std::fill_n(kept, count, 0);
      for (const int32_t index : SelectKept(candidates, params.selection)) kept[index] = 1;
    }
    return absl::OkStatus();
  }

 private:
  static int64_t* GainsOf(const LayerView& layer, int kv_head) {
    return layer.gains.device_address() + kv_head * layer.capacity;
  }
};

}  // namespace

std::unique_ptr<Backend> CreateReferenceBackend() { return std::make_unique<ReferenceBackend>(); }

}  // namespace heavywater
