// One step of the group: some sequences each get some new tokens.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "worker/comm/communicator.h"
#include "worker/rank/attention_step.h"
#include "worker/rank/model.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

// What rank 0 sends to all ranks; every length of the step follows from it.
struct StepDescriptor {
  uint64_t step = 0;                 // counts up; ranks check that they agree
  std::vector<StepItem> items = {};  // a sequence at most once
  std::vector<int32_t> tokens = {};  // of all items, in order
};

// Runs steps, one after the other. One thread.
//
// Cut at the collective, so that a test can drive all ranks on one thread:
// Run() is Before(), the reduce, After().
//
// Two kinds of failure. An item that cannot run (unknown sequence, wrong
// position, no memory, host full) on any rank fails on every rank with its own
// status in item_status(); its sequence is as before the step and the other
// items go on. The step itself fails (FAILED_PRECONDITION naming both values when
// ranks disagree about it; the communicator's or model's error): no sequence has
// advanced. With plan_interval_steps > 1 a failed item loses the score gains
// since its last plan, on all ranks alike.
class DecodeStep {
 public:
  // Both outlive the step.
  DecodeStep(RankCache& cache, Model& model);

  absl::Status Run(const StepDescriptor& descriptor, Communicator& communicator);

  absl::Status Before(const StepDescriptor& descriptor);
  DeviceSpan<int64_t> reduce_buffer() { return attention_.reduce_buffer(); }  // summed over ranks
  absl::Status After();

  // One for each item of the last step.
  std::span<const absl::Status> item_status() const { return attention_.item_status(); }
  // [1 or num_tokens][vocab_size] of an item that did not fail. Valid until the
  // next step or chunk of a prompt.
  DeviceSpan<const float> logits(int item) const;

 private:
  absl::Status Check(const StepDescriptor& descriptor) const;
  void Begin(const StepDescriptor& descriptor);
  absl::Status RunLayers();
  absl::Status RunLayer(int layer);
  absl::Status ComputeLogits();
  absl::Status GatherLastHidden(DeviceSpan<float> to);
  int64_t num_tokens() const { return static_cast<int64_t>(descriptor_.tokens.size()); }

  RankCache& cache_;
  Model& model_;
  AttentionStep attention_;
  StepDescriptor descriptor_;
  std::vector<Position> positions_;  // [num_tokens]
  DeviceSpan<const float> logits_;
};

}  // namespace heavywater
