// The oracle: attention as the formula reads, scalar, in double.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/backend.h"
#include "worker/backend/host_memory.h"
#include "worker/backend/pivotal.h"
#include "worker/backend/reference/recall_oracle.h"
#include "worker/cache/kv_element.h"
#include "worker/policy/selection.h"

namespace heavywater {
namespace {

constexpr double kFixedPointOne = 4294967296.0;  // 2^32

double Element(const std::byte* row, int i, KvDtype dtype) {
  return WithKvElement(dtype, [&]<typename T>(std::type_identity<T>) {
    return double{ToFloat(reinterpret_cast<const T*>(row)[i])};
  });
}

// A token's K and V, and where the attention it receives is added (null: nowhere).
struct KvRow {
  const std::byte* key = nullptr;
  const std::byte* value = nullptr;
  int64_t* gain = nullptr;
};

// One query head over what it may see.
struct Query {
  const KvShape& shape;
  const float* query;  // [head_dim]
  std::span<const KvRow> rows;
  double scale;
  GainKind gains;
  int64_t position;
};

int64_t GainOf(const Query& q, double probability) {
  if (q.gains == GainKind::kProbability) return std::llrint(probability * kFixedPointOne);
  return probability > PivotalThreshold(q.position) ? kPivotalGain : 0;
}

std::vector<double> Logits(const Query& q) {
  std::vector<double> logits;
  for (const KvRow& row : q.rows) {
    double dot = 0;
    for (int i = 0; i < q.shape.head_dim; ++i) {
      dot += q.query[i] * Element(row.key, i, q.shape.dtype);
    }
    logits.push_back(dot * q.scale);
  }
  return logits;
}

// -infinity when nothing is seen.
double LogSumExp(const std::vector<double>& logits) {
  const double maximum =
      std::accumulate(logits.begin(), logits.end(), -std::numeric_limits<double>::infinity(),
                      [](double a, double b) { return std::max(a, b); });
  double sum = 0;
  for (const double logit : logits) sum += std::exp(logit - maximum);
  return maximum + std::log(sum);
}

std::vector<double> Probabilities(const Query& q) {
  std::vector<double> weights = Logits(q);
  double maximum = -std::numeric_limits<double>::infinity();
  for (const double weight : weights) maximum = std::max(maximum, weight);
  double sum = 0;
  for (double& weight : weights) sum += weight = std::exp(weight - maximum);
  for (double& weight : weights) weight /= sum;
  return weights;
}

// Writes the output row and adds to the gains.
void AttendQuery(const Query& q, float* out) {
  const std::vector<double> probabilities = Probabilities(q);
  for (int i = 0; i < q.shape.head_dim; ++i) {
    double sum = 0;
    for (size_t k = 0; k < q.rows.size(); ++k) {
      sum += probabilities[k] * Element(q.rows[k].value, i, q.shape.dtype);
    }
    out[i] = static_cast<float>(sum);
  }
  for (size_t k = 0; k < q.rows.size(); ++k) {
    if (q.rows[k].gain == nullptr) continue;
    *q.rows[k].gain += GainOf(q, probabilities[k]);
  }
}

KvRow RowOfSlot(const KvShape& shape, const LayerView& layer, int kv_head, int64_t slot,
                bool with_gain) {
  const KvHeadRows rows = RowsOfKvHead(shape, layer, kv_head);
  int64_t* gains = layer.gains.device_address() + kv_head * layer.capacity;
  return {
      .key = rows.Key(slot), .value = rows.Value(slot), .gain = with_gain ? gains + slot : nullptr};
}

// The slots of an item that a query at this position sees.
std::vector<KvRow> VisibleRows(const KvShape& shape, const AttendItem& item, int kv_head,
                               Position query_position) {
  const LayerView& layer = item.layer;
  const Position* positions =
      layer.positions.device_address() + SetOfKvHead(layer, kv_head) * layer.capacity;
  std::vector<KvRow> rows;
  for (int64_t slot = 0; slot < layer.used; ++slot) {
    if (positions[slot] == kNoPosition || positions[slot] > query_position) continue;
    rows.push_back(RowOfSlot(shape, layer, kv_head, slot, item.accumulate_gains));
  }
  return rows;
}

KvRow RowOfPick(const KvShape& shape, const RecallView& recall, int kv_head, Position position) {
  const std::byte* row = recall.host.Page(kv_head, position / shape.page_tokens) +
                         int64_t{position % shape.page_tokens} * shape.row_bytes();
  int64_t* gains = recall.gains.data() + kv_head * recall.gains_stride;
  return {.key = row,
          .value = row + shape.row_bytes() / 2,
          .gain = recall.gains.empty() ? nullptr : gains + position};
}

// One token's query heads of one KV head.
class GroupAttention {
 public:
  GroupAttention(const KvShape& shape, const AttendParams& params, const AttendItem& item,
                 int64_t token, int kv_head)
      : shape_(shape), params_(params), item_(item), token_(token), kv_head_(kv_head) {
    rows_ = VisibleRows(shape, item, kv_head, static_cast<Position>(item.first_position + token));
  }

  void Attend() {
    if (item_.recall != nullptr) Recall(*item_.recall);
    for (int head = 0; head < shape_.group_size(); ++head) {
      AttendQuery(QueryOf(head), params_.out.device_address() + Offset(head));
    }
  }

 private:
  int64_t Offset(int head) const {
    const int64_t first = (item_.first_token + token_) * shape_.num_query_heads;
    return (first + int64_t{kv_head_} * shape_.group_size() + head) * shape_.head_dim;
  }
  Query QueryOf(int head) const {
    return {.shape = shape_,
            .query = params_.queries.device_address() + Offset(head),
            .rows = rows_,
            .scale = params_.scale,
            .gains = item_.gains,
            .position = item_.first_position + token_};
  }
  std::vector<double> LogSumExps() const {
    std::vector<double> result;
    for (int head = 0; head < shape_.group_size(); ++head) {
      result.push_back(LogSumExp(Logits(QueryOf(head))));
    }
    return result;
  }

  // Adds the picks to what is attended, and reports them.
  void Recall(const RecallView& recall) {
    PickQuery pick{.recall = recall,
                   .num_sets = item_.layer.num_sets,
                   .kv_head = kv_head_,
                   .queries = {},
                   .lse = LogSumExps(),
                   .scale = params_.scale};
    for (int head = 0; head < shape_.group_size(); ++head) {
      pick.queries.push_back(QueryOf(head).query);
    }
    int64_t missed = 0;
    const std::vector<Position> picks = PickPositions(pick, &missed);
    for (const Position position : picks) {
      rows_.push_back(RowOfPick(shape_, recall, kv_head_, position));
    }
    const int64_t index = token_ * shape_.num_kv_heads + kv_head_;
    if (!recall.num_picks.empty()) recall.num_picks[index] = static_cast<int32_t>(picks.size());
    if (!recall.num_missed.empty()) recall.num_missed[index] = static_cast<int32_t>(missed);
    if (!recall.picks.empty()) {
      const auto count = std::min<int64_t>(static_cast<int64_t>(picks.size()), recall.max_picks);
      std::copy_n(picks.begin(), count, recall.picks.begin() + index * recall.max_picks);
    }
    if (!recall.missing.empty()) {
      recall.missing[index] = static_cast<float>(MissingShare(pick, picks, LogSumExps()));
    }
  }

  const KvShape& shape_;
  const AttendParams& params_;
  const AttendItem& item_;
  const int64_t token_;
  const int kv_head_;
  std::vector<KvRow> rows_;
};

class ReferenceBackend final : public HostMemoryBackend {
 public:
  std::string Name() const override { return "reference"; }
  bool CanRest() const override { return true; }

  absl::Status Attend(const KvShape& shape, const AttendParams& params, Stream& stream) override {
    HW_RETURN_IF_ERROR(CheckBackendShape(shape));
    for (const AttendItem& item : params.items) {
      for (int64_t token = 0; token < item.num_tokens; ++token) {
        for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
          GroupAttention(shape, params, item, token, kv_head).Attend();
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
        std::vector<KvRow> rows;
        for (int64_t slot = 0; slot <= position; ++slot) {
          rows.push_back(RowOfSlot(shape, params.layer, head / shape.group_size(), slot,
                                   position >= params.score_from));
        }
        const int64_t offset = (token * shape.num_query_heads + head) * shape.head_dim;
        AttendQuery({.shape = shape,
                     .query = params.queries.device_address() + offset,
                     .rows = rows,
                     .scale = params.scale,
                     .gains = params.gains,
                     .position = position},
                    params.out.device_address() + offset);
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
};

}  // namespace

std::unique_ptr<Backend> CreateReferenceBackend() { return std::make_unique<ReferenceBackend>(); }

}  // namespace heavywater
