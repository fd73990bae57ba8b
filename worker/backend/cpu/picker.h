// Chooses what one token's queries of a KV head recall: scans the sketches of the
// demoted positions, keeps the best.
#pragma once

#include <span>
#include <vector>

#include "worker/backend/cpu/pick_threshold.h"
#include "worker/backend/cpu/scan_kernels.h"
#include "worker/backend/recall.h"

namespace heavywater {

struct PickerQuery {
  const RecallView* recall = nullptr;
  int num_sets = 1;  // of the layer
  int kv_head = 0;
  std::span<const float* const> queries;  // of the group's heads: scaled, [head_dim]
  std::span<const double> lse;            // per head, what shares are relative to
};

// Holds the scan's workspace, a few KiB, reused between calls. One thread at a time.
class Picker {
 public:
  // Appends the picks to `picks`, ascending. A query that sees no slot (its lse is
  // -infinity) picks nothing, except in mode `all`. Returns how many picks fell on
  // pages that rest and were taken out.
  int64_t Pick(const ScanKernels& kernels, const PickerQuery& query, std::vector<Position>& picks);

  // The estimated share that demoted positions outside `picks` would have had
  // beside what was attended, whose log-sum-exp `lse` is: U / (1 + U), mean over the
  // heads, with U their estimated mass relative to it.
  float MissingShare(const ScanKernels& kernels, const PickerQuery& query,
                     std::span<const Position> picks);

 private:
  void Prepare(const PickerQuery& query);
  void Add(std::span<const PickCandidate> found, int64_t max_picks);
  void Trim(int64_t max_picks);

  ScanQuery scan_;
  std::vector<float> floats_;
  std::vector<int32_t> sums_;
  std::vector<int8_t> weights_;
  std::vector<PickCandidate> candidates_;  // of a page
  PickThreshold threshold_;
  std::vector<uint64_t> best_;  // candidates in one word each, positions ascending
  std::vector<uint64_t> ranked_;
  std::vector<uint16_t> unpicked_;
  std::vector<double> mass_;
};

}  // namespace heavywater
