#include "worker/server/report_queue.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "cache_service/base/check.h"

namespace heavywater {
namespace {

using Tokens = google::protobuf::RepeatedField<int32_t>;

// A sequence that goes on under a new incarnation numbers its plans from a snapshot
// again: what the one before it said is not of the same plans, nor of the same end.
bool SameIncarnation(const v1::PlanReport& a, const v1::PlanReport& b) {
  return a.sequence_id() == b.sequence_id() && a.incarnation() == b.incarnation();
}

void Prepend(const Tokens& first, Tokens& rest) {
  Tokens all = first;
  all.MergeFrom(rest);
  rest.Swap(&all);
}

}  // namespace

void MergeReports(const v1::PlanReport& older, v1::PlanReport& newer) {
  HW_CHECK(SameIncarnation(older, newer));
  newer.set_finished(older.finished() || newer.finished());
  newer.set_watermark(std::max(older.watermark(), newer.watermark()));
  if (older.tokens().empty()) return;
  newer.set_first_token(older.first_token());
  Prepend(older.tokens(), *newer.mutable_tokens());
}

size_t ReportQueue::Newest(const v1::PlanReport& report) const {
  for (size_t i = reports_.size(); i > in_flight_; --i) {
    if (SameIncarnation(reports_[i - 1].queued.report, report)) return i - 1;
  }
  return reports_.size();
}

void ReportQueue::DropReplaced(const v1::PlanReport& report) {
  for (size_t i = reports_.size(); i > in_flight_; --i) {
    const v1::PlanReport& queued = reports_[i - 1].queued.report;
    if (queued.sequence_id() != report.sequence_id()) continue;
    if (queued.incarnation() >= report.incarnation()) continue;
    Remove(i - 1);
    ++dropped_;
  }
}

void ReportQueue::Push(QueuedReport report) {
  DropReplaced(report.report);
  const size_t newest = Newest(report.report);
  if (newest < reports_.size() && !reports_[newest].queued.keep) {
    MergeReports(reports_[newest].queued.report, report.report);
    Remove(newest);
  }
  const auto bytes = static_cast<int64_t>(report.report.ByteSizeLong());
  reports_.push_back({std::move(report), bytes});
  bytes_ += bytes;
  while (OverBound() && reports_.size() > in_flight_ + 1) MergeOldestKept();
}

// The oldest report that may still change goes into the next one of its
// incarnation; one that has no successor is dropped.
void ReportQueue::MergeOldestKept() {
  const size_t oldest = in_flight_;
  const v1::PlanReport& report = reports_[oldest].queued.report;
  ++dropped_;
  for (size_t i = oldest + 1; i < reports_.size(); ++i) {
    Entry& next = reports_[i];
    if (!SameIncarnation(next.queued.report, report)) continue;
    MergeReports(report, next.queued.report);
    bytes_ -= next.bytes;
    next.bytes = static_cast<int64_t>(next.queued.report.ByteSizeLong());
    bytes_ += next.bytes;
    break;
  }
  Remove(oldest);
}

void ReportQueue::Remove(size_t index) {
  bytes_ -= reports_[index].bytes;
  reports_.erase(reports_.begin() + static_cast<std::ptrdiff_t>(index));
}

std::vector<v1::PlanReport> ReportQueue::Peek(int64_t max_bytes) {
  std::vector<v1::PlanReport> batch;
  int64_t bytes = 0;
  for (const Entry& entry : reports_) {
    if (!batch.empty() && bytes + entry.bytes > max_bytes) break;
    batch.push_back(entry.queued.report);
    bytes += entry.bytes;
  }
  in_flight_ = batch.size();
  return batch;
}

void ReportQueue::Pop(size_t count, bool dropped) {
  HW_CHECK(count <= in_flight_);
  if (dropped) dropped_ += static_cast<int64_t>(count);
  for (size_t i = 0; i < count; ++i) Remove(0);
  in_flight_ -= count;
}

}  // namespace heavywater
