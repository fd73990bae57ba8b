// The plan of one layer: h2o at interval 1 with every slot resident, so that one
// position goes.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "tests/bench/timing.h"
#include "tests/worker/backend/layer_image.h"
#include "worker/backend/backend.h"

namespace heavywater {

// Gains to scores, then the choice of whom to keep: all positions but one. `gains` and
// `kept` are [used].
absl::Status EnqueueChoice(Backend& backend, const LayerView& view, DeviceSpan<int64_t> gains,
                           DeviceSpan<uint8_t> kept, Stream& stream);

class PlanCase {
 public:
  PlanCase(Backend& backend, const LayerImage& layer);

  // Gains to scores, the choice, and the victim's slot freed; caches cold, the slot
  // given back before each.
  Timed Step();
  // INTERNAL unless exactly the position that should go went.
  absl::Status Check();

 private:
  void Restore();
  absl::Status Plan();

  Backend& backend_;
  LayerImage image_;
  DeviceLayer layer_;
  DeviceBuffer gains_;  // as they would be reduced
  DeviceBuffer kept_;
  Stream stream_;
};

}  // namespace heavywater
