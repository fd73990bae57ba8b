// A layer of which a fifth of the full cache's bytes stays on the device, and the rest is
// recalled.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "tests/bench/decode_case.h"
#include "tests/worker/backend/layer_image.h"
#include "tests/worker/backend/recall_image.h"

namespace heavywater {

// What stays of a full layer, and all of it as host pages.
struct RecallInputs {
  DecodeInputs full;
  LayerImage resident;
  RecallImage recall;
  Position position = 0;  // of the query: the last
};
absl::StatusOr<RecallInputs> MakeRecallInputs(int64_t context);

// A step with recall on one backend; what only a debugger reads is not asked for.
struct RecallCase {
  RecallCase(Backend& backend, const RecallInputs& inputs, float min_share)
      : recall(backend, BenchShape(), inputs.recall, 1),
        decode(backend, inputs.resident, inputs.full.queries, inputs.position, &recall) {
    recall.view().min_share = min_share;
    recall.view().missing = {};
  }

  DeviceRecall recall;
  DecodeCase decode;
};

// Positions of the full caches that are measured, on every kind of device.
std::span<const int64_t> RecallContexts(bool quick);
// As RecallCase's min_share, above any estimate: the scan runs, nothing is picked.
inline constexpr float kNothingPasses = 1e30f;

// INTERNAL unless the backend's step is the oracle's.
absl::Status CheckRecall(Backend& backend);
// INTERNAL unless each KV head picked between `least` and max_picks demoted positions.
absl::Status CheckPicks(const RecallInputs& inputs, const RecallCase& step, int64_t least);

}  // namespace heavywater
