// What the ranks reduce in a step: their agreement about the step and its items,
// and the gains of all plans due, in one buffer.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "worker/rank/active_item.h"
#include "worker/rank/agreement.h"
#include "worker/rank/plan.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

// buffer: the agreement, the regions that are reduced, the regions of this rank
// alone (scope kv_head); then, never reduced, the sums of the regions' rows. Gains
// stay on the device: to the host come the agreement, recall's regions and the sums.
class StepExchange {
 public:
  explicit StepExchange(RankCache& cache)
      : cache_(cache), agreement_(cache.options().rank, cache.options().world_size, 0) {}

  // Before slots are taken: sets every item's region.
  void Layout(uint64_t step, std::span<ActiveItem> items);
  // After the last layer: this rank's part of the buffer. An item whose gains of
  // this rank alone are wrong gets that status.
  absl::Status Fill(std::span<ActiveItem> items);
  DeviceSpan<int64_t> reduce_buffer() const { return buffer_.Sub(0, reduced_size_); }

  // After the reduce. FAILED_PRECONDITION naming both values when ranks are not in
  // the same step.
  absl::Status Read(std::span<const ActiveItem> items);
  // Whether all ranks can run the item and hold the same of it: the failing
  // rank's code, or FAILED_PRECONDITION naming both values.
  absl::Status CheckItem(int64_t index, const ActiveItem& item) const;
  // Whether any rank has appended and attended.
  bool RanAnywhere(int64_t index) const;
  // What the item's plan follows from.
  PlanInput InputOf(int64_t index, const ActiveItem& item) const;

 private:
  absl::Status CollectGains(std::span<const ActiveItem> items);
  absl::Status CheckOwnRegions(std::span<ActiveItem> items);
  absl::Status SumRowsOf(const ActiveItem& item);         // and copies what the host needs
  absl::Status CopyToHost(int64_t begin, int64_t count);  // of the buffer, to sums_
  void SetAgreement(std::span<const ActiveItem> items);
  absl::Status FillRecall(const ActiveItem& item);
  std::vector<int64_t> RecalledMass(const ActiveItem& item) const;
  absl::Status CheckMassOf(const ActiveItem& item) const;

  RankCache& cache_;
  uint64_t step_ = 0;
  Agreement agreement_;
  int64_t size_ = 0;          // without the sums of rows
  int64_t row_sums_end_ = 0;  // with them
  int64_t reduced_size_ = 0;
  int64_t largest_size_ = 0;  // with every slot in use: the buffer need not grow until then
  DeviceSpan<int64_t> buffer_;
  std::vector<int64_t> sums_;  // its host copy, where the host needs it
};

}  // namespace heavywater
