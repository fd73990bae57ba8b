// Recall's part of a sequence's state. Sketches are not in it: they are coded again
// from the host pages, with the same channels, to the same codes.
#include <algorithm>
#include <cstddef>
#include <span>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/cache/read_device.h"
#include "worker/rank/sequence_recall.h"

namespace heavywater {
namespace {

// Of each KV head ascending and below head_dim: kernels index keys by them.
absl::Status CheckChannels(std::span<const std::byte> channels, const SketchShape& sketch) {
  const auto per_head = static_cast<size_t>(sketch.channels);
  for (size_t i = 0; i < channels.size(); ++i) {
    const int channel = std::to_integer<int>(channels[i]);
    const int before = i % per_head == 0 ? -1 : std::to_integer<int>(channels[i - 1]);
    if (channel > before && channel < sketch.head_dim) continue;
    return absl::DataLossError(absl::StrCat("snapshot: a channel is ", channel, " after ", before,
                                            ", want more, and below ", sketch.head_dim));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<RecallSnapshot> SequenceRecall::Snapshot(bool with_scores) const {
  RecallSnapshot snapshot;
  snapshot.sketched_tokens = sketched_tokens_;
  snapshot.clock = clock_;
  snapshot.steps = steps_;
  snapshot.queries = stats_.queries;
  snapshot.reads = stats_.reads;
  snapshot.reads_max = stats_.reads_max;
  snapshot.promoted = stats_.promoted;
  const DeviceBuffer& state = sketched() ? channels_ : squares_;
  HW_ASSIGN_OR_RETURN(
      (sketched() ? snapshot.channels : snapshot.squares),
      ReadDevice(DeviceSpan<const std::byte>(state.As<std::byte>()), memory_.backend(), stream_));
  for (const Layer& layer : layers_) snapshot.ledgers.push_back(layer.ledger.Save(with_scores));
  return snapshot;
}

absl::Status SequenceRecall::RestoreDevice(const RecallSnapshot& snapshot) {
  const bool sketched = snapshot.sketched_tokens > 0;
  const DeviceBuffer& state = sketched ? channels_ : squares_;
  const std::vector<std::byte>& bytes = sketched ? snapshot.channels : snapshot.squares;
  if (static_cast<int64_t>(bytes.size()) != state.bytes() ||
      snapshot.ledgers.size() != layers_.size()) {
    return absl::DataLossError(absl::StrCat("snapshot: recall has ", bytes.size(), " bytes and ",
                                            snapshot.ledgers.size(), " ledgers, want ",
                                            state.bytes(), " and ", layers_.size()));
  }
  if (sketched) HW_RETURN_IF_ERROR(CheckChannels(bytes, sketch_));
  return memory_.backend().CopyToDevice(state.As<std::byte>(), bytes, stream_);
}

void SequenceRecall::MarkAbsent(int layer, int set, const SlotSnapshot& slots, int64_t tokens) {
  std::vector<bool> resident(static_cast<size_t>(tokens), false);
  for (const Position position : slots.positions) {
    if (position != kNoPosition) resident[static_cast<size_t>(position)] = true;
  }
  for (Position position = 0; position < tokens; ++position) {
    if (!resident[static_cast<size_t>(position)]) MarkDemoted(layer, set, position);
  }
}

absl::Status SequenceRecall::Restore(const RecallSnapshot& snapshot,
                                     std::span<const SlotSnapshot> slots, int64_t tokens_seen) {
  HW_RETURN_IF_ERROR(RestoreDevice(snapshot));
  clock_ = snapshot.clock;
  steps_ = snapshot.steps;
  stats_.queries = snapshot.queries;
  stats_.reads = snapshot.reads;
  stats_.reads_max = snapshot.reads_max;
  stats_.promoted = snapshot.promoted;
  if (snapshot.sketched_tokens == 0) return absl::OkStatus();
  if (snapshot.sketched_tokens > tokens_seen) {
    return absl::DataLossError(absl::StrCat(
        "snapshot: sketched_tokens is ", snapshot.sketched_tokens, ", want at most ", tokens_seen));
  }
  HW_RETURN_IF_ERROR(AddPages(tokens_seen));
  for (int index = 0; index < rank_.shape.num_layers; ++index) {
    Layer& layer = layers_[index];
    HW_RETURN_IF_ERROR(layer.ledger.Load(snapshot.ledgers[static_cast<size_t>(index)]));
    for (int set = 0; set < num_sets_; ++set) {
      MarkAbsent(index, set, slots[static_cast<size_t>(index) * num_sets_ + set], tokens_seen);
    }
    HW_RETURN_IF_ERROR(EncodeLayer(index, 0, snapshot.sketched_tokens));
    HW_RETURN_IF_ERROR(Upload(index));
  }
  sketched_tokens_ = snapshot.sketched_tokens;
  squares_ = DeviceBuffer();
  stats_.sketch_bytes = device_bytes();
  return absl::OkStatus();
}

}  // namespace heavywater
