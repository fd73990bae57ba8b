// Turns what a rank planned into reports for the registry, behind the step.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "cache_service/base/ids.h"
#include "heavywater/v1/group.pb.h"
#include "worker/rank/rank_cache.h"
#include "worker/server/reporter.h"

namespace heavywater {

// The wire form of `report`, numbered `plan`. Scope layer: only rank 0 carries
// the sets, since all ranks hold the same.
v1::PlanReport PlanReportToProto(const PlanReport& report, int64_t plan, int rank);

// Used by the thread of the step.
class PlanReports {
 public:
  // `reporter` null: nobody to tell. Both outlive this.
  PlanReports(RankCache& cache, Reporter* reporter);
  // `push` queues a report, and returns at once; what Close() returned may call it, too.
  PlanReports(RankCache& cache, std::function<void(QueuedReport)> push)
      : cache_(cache), push_(std::move(push)) {}

  // Tokens that the sequence has taken in, from `first_position` on.
  void AddTokens(SequenceId sequence, int64_t first_position, std::span<const int32_t> tokens);
  // Reports the state after the last step and returns the plan's number. Plans
  // count from 1, the prompt's end. A state with tokens since the last plan (a
  // sequence's end) counts as one plan more, so that a number means one state.
  // `with_snapshot`: with the state to go on from, where it can be given.
  absl::StatusOr<int64_t> Report(SequenceId sequence, bool with_sets, bool with_snapshot = false);
  // The sequence was restored as it was after this report.
  void Resume(SequenceId sequence, int64_t plan, int64_t tokens_seen, int32_t incarnation);
  // Forgets the sequence. The result tells the registry that the rank writes no
  // more; to be called once that is true, on any thread, while the reporter lives.
  std::function<void()> Close(SequenceId sequence);

 private:
  struct Sequence {
    int64_t first_token = 0;
    std::vector<int32_t> tokens;  // not reported yet; rank 0 only
    v1::PlanReport last;          // without sets and tokens
  };

  void AddSnapshot(SequenceId sequence, v1::PlanReport& proto) const;

  RankCache& cache_;
  const std::function<void(QueuedReport)> push_;  // empty: nobody to tell
  std::map<SequenceId, Sequence> sequences_;
};

}  // namespace heavywater
