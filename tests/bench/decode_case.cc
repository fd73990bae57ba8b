#include "tests/bench/decode_case.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

constexpr uint32_t kSeed = 1;
constexpr float kQueryDeviation = 2;  // also that of the logits: keys have 1 on average
constexpr float kSinkLogit = 10;
// Every fourth channel has most of a key's variance, so that a sketch tells keys apart.
constexpr float kStrongDeviation = 1.9f;
constexpr float kWeakDeviation = 0.36f;
constexpr double kOne = 4294967296.0;  // 2^32

float Scale(const KvShape& shape) { return 1 / std::sqrt(static_cast<float>(shape.head_dim)); }

// Every query head of the group gives the key about kSinkLogit.
void MakeSink(const KvShape& shape, DecodeInputs& inputs) {
  const float share = kSinkLogit / (Scale(shape) * static_cast<float>(shape.head_dim) *
                                    kQueryDeviation * kQueryDeviation);
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    std::vector<float> key(shape.head_dim);
    for (int head = 0; head < shape.group_size(); ++head) {
      const int row = (kv_head * shape.group_size() + head) * shape.head_dim;
      for (int c = 0; c < shape.head_dim; ++c) key[c] += share * inputs.queries[row + c];
    }
    const std::vector<std::byte> stored = Stored(key, shape.dtype);
    std::ranges::copy(stored, inputs.layer.keys.begin() + kv_head * inputs.layer.capacity *
                                                              static_cast<int64_t>(stored.size()));
  }
}

// Slot i holds position i.
LayerImage RandomLayer(std::mt19937& rng, const KvShape& shape, int64_t context) {
  LayerImage layer = EmptyLayer(shape, 1, context);
  std::iota(layer.positions.begin(), layer.positions.end(), 0);
  const int64_t elements = shape.num_kv_heads * context * shape.head_dim;
  layer.values = Stored(RandomFloats(rng, elements), shape.dtype);
  std::vector<float> keys = RandomFloats(rng, elements, kWeakDeviation);
  for (size_t i = 0; i < keys.size(); i += 4) keys[i] *= kStrongDeviation / kWeakDeviation;
  layer.keys = Stored(keys, shape.dtype);
  return layer;
}

LayerImage Repeat(const KvShape& shape, const LayerImage& from, int64_t context) {
  LayerImage layer = EmptyLayer(shape, 1, context);
  std::iota(layer.positions.begin(), layer.positions.end(), 0);
  layer.used = context;
  const int64_t row = shape.row_bytes() / 2;
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    for (int64_t first = 0; first < context; first += from.capacity) {
      const int64_t bytes = std::min(from.capacity, context - first) * row;
      const int64_t source = kv_head * from.capacity * row;
      const int64_t target = (kv_head * context + first) * row;
      std::copy_n(from.keys.begin() + source, bytes, layer.keys.begin() + target);
      std::copy_n(from.values.begin() + source, bytes, layer.values.begin() + target);
    }
  }
  return layer;
}

absl::Status CheckClose(const char* what, double got, double want, double tolerance) {
  if (std::abs(got - want) <= tolerance) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(what, " is ", got, ", want ", want));
}

template <typename T>
void Flush(const DeviceSpan<T>& span) {
  FlushFromCaches(span.device_address(), span.size());
}

}  // namespace

KvShape BenchShape() {
  return {.num_layers = 1,
          .num_query_heads = 32,
          .num_kv_heads = 8,
          .first_kv_head = 0,
          .total_kv_heads = 8,
          .total_query_heads = 32,
          .head_dim = 128,
          .dtype = KvDtype::kBFloat16,
          .page_tokens = 256};
}

int64_t KvBytes(int64_t positions) {
  const KvShape shape = BenchShape();
  return positions * shape.num_kv_heads * shape.row_bytes();
}

double AttentionOperations(int64_t positions) {
  const KvShape shape = BenchShape();
  return 4.0 * static_cast<double>(positions) * shape.num_query_heads * shape.head_dim;
}

DecodeInputs RandomInputs(int64_t context) { return RepeatedInputs(context, context); }

DecodeInputs RepeatedInputs(int64_t context, int64_t period) {
  const KvShape shape = BenchShape();
  std::mt19937 rng(kSeed);
  LayerImage layer = RandomLayer(rng, shape, std::min(context, period));
  DecodeInputs inputs{.layer = period < context ? Repeat(shape, layer, context) : std::move(layer),
                      .queries = {}};
  inputs.queries =
      RandomFloats(rng, int64_t{shape.num_query_heads} * shape.head_dim, kQueryDeviation);
  MakeSink(shape, inputs);
  return inputs;
}

DecodeCase::DecodeCase(Backend& backend, const LayerImage& layer, const std::vector<float>& queries,
                       Position position, DeviceRecall* recall)
    : backend_(backend),
      layer_(backend, layer),
      position_(position),
      recall_(recall),
      queries_(Upload(backend, queries)),
      out_(Upload(backend, std::vector<float>(queries.size()))) {
  const RecallLimits limits = recall == nullptr ? RecallLimits() : LimitsOf(recall->view());
  scratch_ =
      backend.Allocate(backend.AttendScratchBytes(BenchShape(), layer.capacity, limits)).value();
}

absl::Status DecodeCase::Attend(bool accumulate_gains) {
  const AttendItem item{.layer = layer_.view(),
                        .first_token = 0,
                        .num_tokens = 1,
                        .first_position = position_,
                        .accumulate_gains = accumulate_gains,
                        .recall = recall_ == nullptr ? nullptr : &recall_->view()};
  HW_RETURN_IF_ERROR(backend_.Attend(BenchShape(),
                                     {.items = {&item, 1},
                                      .queries = queries_.As<float>(),
                                      .out = out_.As<float>(),
                                      .scratch = scratch_.As<std::byte>(),
                                      .scale = Scale(BenchShape())},
                                     stream_));
  return backend_.Synchronize(stream_);
}

Timed DecodeCase::Step(bool accumulate_gains) {
  return {.prepare = [this] { Flush(); },
          .run = [this, accumulate_gains] { HW_CHECK(Attend(accumulate_gains).ok()); }};
}

void DecodeCase::Flush() const {
  const LayerView& view = layer_.view();
  heavywater::Flush(view.keys);
  heavywater::Flush(view.values);
  heavywater::Flush(view.positions);
  heavywater::Flush(view.scores);
  heavywater::Flush(view.gains);
  if (recall_ != nullptr) FlushRecall();
}

void DecodeCase::FlushRecall() const {
  const RecallView& recall = recall_->view();
  for (const DeviceSpan<std::byte>& page : recall.pages) heavywater::Flush(page);
  heavywater::Flush(recall.demoted);
  heavywater::Flush(recall.channels);
  FlushFromCaches(recall.gains.data(), static_cast<int64_t>(recall.gains.size()));
  // Of the host's copies a step reads the picks, and the queries are always the same.
  const KvShape shape = BenchShape();
  for (size_t i = 0; i < recall.num_picks.size(); ++i) {
    for (int32_t k = 0; k < recall.num_picks[i]; ++k) {
      const Position pick = recall.picks[static_cast<int64_t>(i) * recall.max_picks + k];
      const std::byte* page = recall.host.Page(static_cast<int>(i), pick / shape.page_tokens);
      FlushFromCaches(page + pick % shape.page_tokens * shape.row_bytes(), shape.row_bytes());
    }
  }
}

// Of a step, [num_kv_heads]: over the slots and the picks.
std::vector<int64_t> DecodeCase::StepGains() {
  const auto sums = [this] {
    const auto sum_rows = [](const auto& gains, std::vector<int64_t>& to) {
      const size_t stride = gains.size() / to.size();
      for (size_t i = 0; i < gains.size(); ++i) to[i / stride] += gains[i];
    };
    std::vector<int64_t> sum(BenchShape().num_kv_heads);
    sum_rows(layer_.Read().gains, sum);
    if (recall_ != nullptr) sum_rows(recall_->Read().gains, sum);
    return sum;
  };
  HW_CHECK(Attend().ok());  // reports are there after the first
  const std::vector<int64_t> before = sums();
  HW_CHECK(Attend().ok());
  std::vector<int64_t> step = sums();
  for (size_t i = 0; i < step.size(); ++i) step[i] -= before[i];
  return step;
}

absl::Status DecodeCase::CheckGains() {
  for (const int64_t gains : StepGains()) {
    HW_RETURN_IF_ERROR(CheckClose("the sum of a KV head's gains over its queries",
                                  static_cast<double>(gains) / kOne, BenchShape().group_size(),
                                  1e-4));
  }
  return absl::OkStatus();
}

absl::Status DecodeCase::CheckAgainst(DecodeCase& reference) {
  HW_RETURN_IF_ERROR(Attend());
  HW_RETURN_IF_ERROR(reference.Attend());
  const std::vector<float> out = Download<float>(backend_, out_);
  const std::vector<float> want = Download<float>(reference.backend_, reference.out_);
  for (size_t i = 0; i < want.size(); ++i) {
    HW_RETURN_IF_ERROR(CheckClose("an output", out[i], want[i], 1e-4 * (1 + std::abs(want[i]))));
  }
  const std::vector<int64_t> gains = layer_.Read().gains;
  const std::vector<int64_t> want_gains = reference.layer_.Read().gains;
  for (size_t i = 0; i < want_gains.size(); ++i) {
    HW_RETURN_IF_ERROR(CheckClose("a gain", static_cast<double>(gains[i]) / kOne,
                                  static_cast<double>(want_gains[i]) / kOne, 1e-4));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
