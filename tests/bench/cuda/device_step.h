// One decode step's attention and plan over several layers, each in memory of its own,
// so that together they are more than the device's cache holds.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "tests/bench/decode_case.h"
#include "tests/worker/backend/layer_image.h"
#include "worker/backend/backend.h"

namespace heavywater {

class DeviceStep {
 public:
  // `recalls`: one for each layer, or none; of the same backend, outlive this.
  DeviceStep(Backend& backend, const LayerImage& layer, const std::vector<float>& queries,
             Position position, int num_layers, int batch,
             const std::vector<const RecallView*>& recalls = {});

  int num_layers() const { return static_cast<int>(layers_.size()) / batch_; }
  int64_t kv_bytes() const { return num_layers() * batch_ * KvBytes(used_); }

  absl::Status EnqueueAttention(Stream& stream, bool accumulate_gains = true);
  // What h2o does at interval 1 on the device, every slot resident: gains to scores,
  // the choice, the victim's number.
  absl::Status EnqueuePlan(Stream& stream);

 private:
  Backend& backend_;
  const int batch_;
  const int64_t used_;
  const Position position_;
  std::vector<DeviceLayer> layers_;  // [num_layers][batch]
  std::vector<const RecallView*> recalls_;
  DeviceBuffer queries_;
  DeviceBuffer out_;
  DeviceBuffer scratch_;
  DeviceBuffer collected_;
  DeviceBuffer kept_;
  DeviceBuffer victim_;
  DeviceBuffer victim_score_;
};

// Enough layers for four times the device's cache, and at least a few.
int LayersBeyondCache(int64_t layer_bytes, int64_t cache_bytes);

}  // namespace heavywater
