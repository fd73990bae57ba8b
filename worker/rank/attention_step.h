// The cache's part of a step, without a model: what DecodeStep runs around its
// model's layers, and what an engine with its own Q, K and V drives layer by layer
// (AttentionEngine).
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/backend/backend.h"
#include "worker/rank/active_item.h"
#include "worker/rank/attention_rows.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

class StepExchange;

// Runs steps, one after the other, each as
//
//   Begin(step, items);
//   for each layer: AppendAndAttend(layer, rows);
//   BeforeReduce();  sum reduce_buffer() over the ranks;  AfterReduce();
//
// Every rank makes the same calls. After any error the caller calls UndoAll()
// (AfterReduce() has done so itself). One thread.
class AttentionStep {
 public:
  // The cache outlives the step.
  explicit AttentionStep(RankCache& cache);
  ~AttentionStep();

  // An item that cannot run here goes through the step without touching its
  // sequence: the other ranks learn of it in the reduce. Item i has its rows from
  // first_rows[i] on, of `num_rows` that the step's rows have.
  void Begin(uint64_t step, std::span<const StepItem> items, std::span<const int64_t> first_rows,
             int64_t num_rows);

  // Steps 1 to 3 of a layer: append K and V, scan the sketches and pick, attend once.
  // Layers in order. An item that does not run gets zeros; rows that belong to no
  // item of these are not looked at.
  absl::Status AppendAndAttend(int layer, const AttentionRows& rows);

  // Step 4: this rank's part of what is reduced.
  absl::Status BeforeReduce();
  DeviceSpan<int64_t> reduce_buffer();
  // Step 5: agree, then plan. An error: ranks are not in the same step, and no
  // sequence has advanced.
  absl::Status AfterReduce();

  // No sequence advances, every item gets `reason`.
  void UndoAll(const absl::Status& reason);

  std::span<ActiveItem> items() { return items_; }
  std::span<const ActiveItem> items() const { return items_; }
  // One for each item: before AfterReduce() what this rank alone knows.
  std::span<const absl::Status> item_status() const { return item_status_; }

 private:
  absl::Status Admit(ActiveItem& item);
  absl::Status AppendKv(int layer, const AttentionRows& rows);
  absl::Status ObserveQueries(int layer, const AttentionRows& rows);
  absl::Status Attend(int layer, const AttentionRows& rows);
  absl::Status AwaitPicks(int layer, std::span<const AttendItem> attends, AttendParams params);
  absl::StatusOr<std::vector<AttendItem>> AttendOracles(int layer,
                                                        std::span<const AttendItem> attends,
                                                        const AttendParams& params);
  absl::Status ZeroRowsThatDoNotRun(const AttentionRows& rows);
  absl::Status Finish(int64_t index);
  absl::Status Undo(ActiveItem& item);
  void GiveUpExcess();

  RankCache& cache_;
  std::unique_ptr<StepExchange> exchange_;
  std::vector<ActiveItem> items_;
  std::vector<absl::Status> item_status_;
  int64_t num_rows_ = 0;
  int64_t extra_logits_rows_ = 0;   // beyond one for each item
  absl::Duration picks_wait_left_;  // for pages that rest, of all sequences together
  absl::Duration plans_wait_left_;  // likewise
};

}  // namespace heavywater
