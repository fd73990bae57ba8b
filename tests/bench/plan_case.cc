#include "tests/bench/plan_case.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "tests/bench/decode_case.h"

namespace heavywater {
namespace {

// With scores as if attention had varied.
LayerImage Scored(LayerImage image) {
  std::mt19937 rng(1);
  for (int64_t& score : image.scores) score = 1 + rng();
  for (int64_t& gain : image.gains) gain = rng() >> 8;
  return image;
}

}  // namespace

PlanCase::PlanCase(Backend& backend, const LayerImage& layer)
    : backend_(backend),
      image_(Scored(layer)),
      layer_(backend, image_),
      gains_(backend.Allocate(layer.used * int64_t{sizeof(int64_t)}).value()),
      kept_(backend.Allocate(layer.used).value()) {}

absl::Status EnqueueChoice(Backend& backend, const LayerView& view, DeviceSpan<int64_t> gains,
                           DeviceSpan<uint8_t> kept, Stream& stream) {
  HW_RETURN_IF_ERROR(backend.CollectGains(BenchShape(), view, gains, stream));
  HW_RETURN_IF_ERROR(backend.AddScores(view, gains, 1.0, stream));
  return backend.Select({.positions = view.positions,
                         .scores = view.scores,
                         .kept = kept,
                         .num_sets = 1,
                         .stride = view.capacity,
                         .count = view.used,
                         .selection = {.budget_tokens = view.used - 1,
                                       .sink_tokens = 0,
                                       .recent_tokens = view.used / 2,
                                       .tokens_seen = view.used}},
                        stream);
}

absl::Status PlanCase::Plan() {
  const LayerView& view = layer_.view();
  HW_RETURN_IF_ERROR(
      EnqueueChoice(backend_, view, gains_.As<int64_t>(), kept_.As<uint8_t>(), stream_));
  const std::vector<uint8_t> kept = Download<uint8_t>(backend_, kept_);
  const auto victim = std::ranges::find(kept, 0);
  HW_CHECK(victim != kept.end());
  const auto slot = static_cast<int32_t>(victim - kept.begin());
  return backend_.ReleaseSlots(BenchShape(), view, 0, {&slot, 1}, stream_);
}

// Tables as they were, out of the caches.
void PlanCase::Restore() {
  const LayerView& view = layer_.view();
  const auto restore = [&](const auto& span, const auto& from) {
    const DeviceSpan<std::byte> to(reinterpret_cast<std::byte*>(span.device_address()),
                                   span.size_bytes());
    HW_CHECK(backend_.CopyToDevice(to, std::as_bytes(std::span(from)), stream_).ok());
    FlushFromCaches(span.device_address(), span.size());
  };
  restore(view.positions, image_.positions);
  restore(view.scores, image_.scores);
  restore(view.gains, image_.gains);
}

Timed PlanCase::Step() {
  return {.prepare = [this] { Restore(); }, .run = [this] { HW_CHECK(Plan().ok()); }};
}

absl::Status PlanCase::Check() {
  Restore();
  HW_RETURN_IF_ERROR(Plan());
  std::vector<int64_t> scores = image_.scores;
  for (size_t i = 0; i < image_.gains.size(); ++i) {
    scores[i % scores.size()] += image_.gains[i];
  }
  const auto candidates_end = scores.begin() + static_cast<int64_t>(scores.size() / 2);
  const auto want = std::min_element(scores.begin(), candidates_end) - scores.begin();
  std::vector<Position> positions = image_.positions;
  positions[want] = kNoPosition;
  if (layer_.Read().positions == positions) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the plan did not free slot ", want, " alone"));
}

}  // namespace heavywater
