#include "tests/bench/cuda/device_step.h"

#include <algorithm>
#include <cmath>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "tests/bench/plan_case.h"

namespace heavywater {
namespace {

constexpr int64_t kTimesCache = 4;
constexpr int kMinLayers = 4;
constexpr int kMaxLayers = 64;

std::vector<float> Repeated(const std::vector<float>& row, int count) {
  std::vector<float> rows;
  for (int i = 0; i < count; ++i) rows.insert(rows.end(), row.begin(), row.end());
  return rows;
}

}  // namespace

int LayersBeyondCache(int64_t layer_bytes, int64_t cache_bytes) {
  const int64_t layers = kTimesCache * cache_bytes / layer_bytes + 1;
  return static_cast<int>(std::clamp<int64_t>(layers, kMinLayers, kMaxLayers));
}

DeviceStep::DeviceStep(Backend& backend, const LayerImage& layer, const std::vector<float>& queries,
                       Position position, int num_layers, int batch,
                       const std::vector<const RecallView*>& recalls)
    : backend_(backend),
      batch_(batch),
      used_(layer.used),
      position_(position),
      recalls_(recalls),
      queries_(Upload(backend, Repeated(queries, batch))),
      out_(Upload(backend, Repeated(queries, batch))),
      collected_(Upload(backend, std::vector<int64_t>(layer.used))),
      kept_(Upload(backend, std::vector<uint8_t>(layer.used))),
      victim_(Upload(backend, std::vector<int32_t>(1))),
      victim_score_(Upload(backend, std::vector<int64_t>(1))) {
  HW_CHECK(recalls.empty() || static_cast<int>(recalls.size()) == num_layers);
  for (int i = 0; i < num_layers * batch; ++i) layers_.emplace_back(backend, layer);
  RecallLimits limits;
  for (const RecallView* recall : recalls) limits.Raise(LimitsOf(*recall));
  scratch_ =
      backend.Allocate(backend.AttendScratchBytes(BenchShape(), layer.capacity, limits)).value();
  Stream uploads;
  HW_CHECK(backend.Synchronize(uploads).ok());
}

absl::Status DeviceStep::EnqueueAttention(Stream& stream, bool accumulate_gains) {
  for (int layer = 0; layer < num_layers(); ++layer) {
    std::vector<AttendItem> items;
    for (int i = 0; i < batch_; ++i) {
      items.push_back({.layer = layers_[layer * batch_ + i].view(),
                       .first_token = i,
                       .num_tokens = 1,
                       .first_position = position_,
                       .accumulate_gains = accumulate_gains,
                       .recall = recalls_.empty() ? nullptr : recalls_[layer]});
    }
    HW_RETURN_IF_ERROR(
        backend_.Attend(BenchShape(),
                        {.items = items,
                         .queries = queries_.As<float>(),
                         .out = out_.As<float>(),
                         .scratch = scratch_.As<std::byte>(),
                         .scale = 1 / std::sqrt(static_cast<float>(BenchShape().head_dim))},
                        stream));
  }
  return absl::OkStatus();
}

absl::Status DeviceStep::EnqueuePlan(Stream& stream) {
  for (const DeviceLayer& layer : layers_) {
    const LayerView& view = layer.view();
    HW_RETURN_IF_ERROR(
        EnqueueChoice(backend_, view, collected_.As<int64_t>(), kept_.As<uint8_t>(), stream));
    HW_RETURN_IF_ERROR(backend_.CollectVictims({.positions = view.positions,
                                                .scores = view.scores,
                                                .kept = kept_.As<uint8_t>(),
                                                .victims = victim_.As<int32_t>(),
                                                .victim_scores = victim_score_.As<int64_t>(),
                                                .num_sets = 1,
                                                .stride = view.capacity,
                                                .kept_stride = view.used,
                                                .used = view.used,
                                                .max_victims = 1},
                                               stream));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
