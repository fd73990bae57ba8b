// Reports of plans on their way to the cache service: bounded, and merged where
// a later one says all that an earlier one said.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "cache_service/base/ids.h"
#include "heavywater/v1/group.pb.h"

namespace heavywater {

// A report of one plan, with what it must not be merged into.
struct QueuedReport {
  v1::PlanReport report;
  // The registry waits for this very plan from every rank (sets are reported at
  // it), so it stays a report of its own while the queue has room.
  bool keep = false;
};

// Not thread safe.
class ReportQueue {
 public:
  ReportQueue(size_t max_reports, int64_t max_bytes)
      : max_reports_(max_reports), max_bytes_(max_bytes) {}

  // Merges into the newest report of the same sequence and incarnation where that one
  // need not be kept; those of earlier incarnations are dropped, and counted. Over the bound, kept
  // ones are merged too, and at last the oldest goes; both are counted.
  void Push(QueuedReport report);

  // Copies of the oldest reports, at most `max_bytes` together and at least one
  // when there is one. They stay in the queue, and no longer change, until Pop().
  std::vector<v1::PlanReport> Peek(int64_t max_bytes);
  // The oldest `count` have arrived (or can never arrive: then they count as dropped).
  void Pop(size_t count, bool dropped = false);

  size_t size() const { return reports_.size(); }
  int64_t bytes() const { return bytes_; }
  int64_t dropped() const { return dropped_; }

 private:
  struct Entry {
    QueuedReport queued;
    int64_t bytes = 0;
  };
  bool OverBound() const { return reports_.size() > max_reports_ || bytes_ > max_bytes_; }
  // Where the newest report of the same incarnation of `report`'s sequence is, of
  // those that are not in flight; size() where there is none.
  size_t Newest(const v1::PlanReport& report) const;
  // The cache service refuses what earlier incarnations said.
  void DropReplaced(const v1::PlanReport& report);
  void MergeOldestKept();
  void Remove(size_t index);

  const size_t max_reports_;
  const int64_t max_bytes_;
  std::deque<Entry> reports_;
  size_t in_flight_ = 0;  // the first ones, handed out by Peek()
  int64_t bytes_ = 0;
  int64_t dropped_ = 0;
};

// `older` and then `newer`, both of one incarnation of one sequence, as one report of the newer
// plan: nothing but the older plan's hash and sets is lost.
void MergeReports(const v1::PlanReport& older, v1::PlanReport& newer);

}  // namespace heavywater
