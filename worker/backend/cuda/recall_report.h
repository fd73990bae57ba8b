// The way of a wave's picks from the device to the spans of RecallView.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/backend/cuda/attend_wave.h"
#include "worker/backend/cuda/host_results.h"
#include "worker/backend/cuda/recall_wave.h"

namespace heavywater::cuda {

// One token that has recall: the spans of its item's view, which itself may be gone
// when results arrive.
struct RecallTarget {
  int64_t token = 0;       // of the wave
  int64_t item_token = 0;  // within the item
  std::span<int64_t> gains;
  int64_t gains_stride = 0;
  std::span<int32_t> num_picks;
  std::span<Position> picks;
  int64_t max_picks = 0;
  std::span<float> missing;
};
struct RecallTargets {
  std::vector<RecallTarget> tokens;
  int num_kv_heads = 0;
  int64_t max_picks = 0;  // the most that a KV head may report; 0: none are wanted

  bool empty() const { return tokens.empty(); }
};
// Of the wave's tokens whose items want anything.
RecallTargets TargetsOf(std::span<const AttendItem> items, std::span<const WaveToken> wave,
                        int num_kv_heads);

// Picks of each of `lists` that one report has room for.
int64_t PicksAtOnce(int64_t lists);

// Pinned memory for picks [first, first + count) of each list; delivered to the targets.
absl::StatusOr<RecallReport> ExpectReport(HostResults& results, const RecallTargets& targets,
                                          int64_t lists, int64_t first, int64_t count,
                                          cudaStream_t stream);

}  // namespace heavywater::cuda
