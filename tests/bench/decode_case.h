// One decode step's attention in one layer: 32 query heads over 8 KV heads of size 128
// in bfloat16, one sequence, one thread.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "absl/status/status.h"
#include "tests/bench/timing.h"
#include "tests/worker/backend/layer_image.h"
#include "tests/worker/backend/recall_image.h"
#include "worker/backend/backend.h"

namespace heavywater {

KvShape BenchShape();
// K and V that one step reads of `positions`.
int64_t KvBytes(int64_t positions);
// Multiplications and additions of one step's logits and outputs.
double AttentionOperations(int64_t positions);

// A layer and the queries of the token at its last position.
struct DecodeInputs {
  LayerImage layer;            // slot i holds position i
  std::vector<float> queries;  // [num_query_heads][head_dim]
};
// Random keys, but for position 0: a sink that takes most of the attention, as in real
// models. Without it half of all positions would be worth recalling.
DecodeInputs RandomInputs(int64_t context);
// Quicker to make: keys and values repeat with a period of `period` positions.
DecodeInputs RepeatedInputs(int64_t context, int64_t period);

// The step on one backend.
class DecodeCase {
 public:
  // `recall` null: without; of the same backend, outlives this.
  DecodeCase(Backend& backend, const LayerImage& layer, const std::vector<float>& queries,
             Position position, DeviceRecall* recall = nullptr);

  // With caches cold.
  Timed Step(bool accumulate_gains = true);
  absl::Status Attend(bool accumulate_gains = true);

  // INTERNAL when one step's gains, of picks too, do not sum to one per query.
  absl::Status CheckGains();
  // INTERNAL when this step's results differ from the other backend's.
  absl::Status CheckAgainst(DecodeCase& reference);

  const LayerView& layer() const { return layer_.view(); }
  // Keys, values and tables, and what recall reads.
  void Flush() const;

 private:
  std::vector<int64_t> StepGains();
  void FlushRecall() const;

  Backend& backend_;
  DeviceLayer layer_;
  Position position_;
  DeviceRecall* recall_;
  DeviceBuffer queries_;
  DeviceBuffer out_;
  DeviceBuffer scratch_;
  Stream stream_;
};

}  // namespace heavywater
