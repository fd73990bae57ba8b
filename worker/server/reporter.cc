#include "worker/server/reporter.h"

#include <grpcpp/grpcpp.h>

#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/runtime/logging.h"
#include "worker/server/backoff.h"
#include "worker/server/split_report.h"

namespace heavywater {
namespace {

void LogRefused(const v1::PlanReport& report, const absl::Status& status) {
  LogWarn(
      "report refused",
      {{"sequence", report.sequence_id()}, {"plan", report.plan()}, {"error", status.ToString()}});
}

constexpr int64_t kMaxBatchBytes = 1 << 20;
constexpr absl::Duration kTimeout = absl::Seconds(3);

// The service will never take it, or gRPC never carry it (RESOURCE_EXHAUSTED: it
// exceeds a message). All else may pass: an outage, a restart (it does not know
// the group), another epoch until the ranks have joined anew.
bool IsRefused(const absl::Status& status) {
  return absl::IsInvalidArgument(status) || absl::IsOutOfRange(status) ||
         absl::IsPermissionDenied(status) || absl::IsUnimplemented(status) ||
         absl::IsResourceExhausted(status);
}

}  // namespace

Reporter::Reporter(CacheLink& link, Options options)
    : link_(link), queue_(options.max_reports, options.max_bytes), thread_([this] { Run(); }) {}

Reporter::~Reporter() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
  }
  thread_.join();
}

void Reporter::Push(QueuedReport report) {
  MutexLock lock(&mutex_);
  queue_.Push(std::move(report));
  changed_.SignalAll();
}

bool Reporter::Flush(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  MutexLock lock(&mutex_);
  while (queue_.size() > 0 && absl::Now() < deadline) {
    changed_.WaitWithTimeout(&mutex_, deadline - absl::Now());
  }
  return queue_.size() == 0;
}

int64_t Reporter::queued() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(queue_.size());
}

int64_t Reporter::dropped() const {
  MutexLock lock(&mutex_);
  return queue_.dropped();
}

void Reporter::Run() {
  Backoff backoff(absl::Milliseconds(50), absl::Seconds(1));
  absl::Time not_before = absl::InfinitePast();
  while (true) {
    {
      MutexLock lock(&mutex_);
      while (!stopping_ && (queue_.size() == 0 || absl::Now() < not_before)) {
        changed_.WaitWithTimeout(&mutex_,
                                 queue_.size() == 0 ? absl::Seconds(1) : not_before - absl::Now());
      }
      if (stopping_) return;
    }
    if (SendSome().ok()) {
      backoff.Reset();
    } else {
      not_before = absl::Now() + backoff.Next();
    }
  }
}

absl::Status Reporter::SendSome() {
  std::vector<v1::PlanReport> batch;
  {
    MutexLock lock(&mutex_);
    batch = queue_.Peek(kMaxBatchBytes);
  }
  if (batch.empty()) return absl::OkStatus();
  const absl::Status status = SendBatch(batch);
  if (!status.ok() && !IsRefused(status)) return status;
  if (!status.ok() && batch.size() > 1) {
    SendOneByOne(batch);
    return absl::OkStatus();
  }
  if (!status.ok()) LogRefused(batch[0], status);
  MutexLock lock(&mutex_);
  queue_.Pop(batch.size(), /*dropped=*/!status.ok());
  changed_.SignalAll();
  return absl::OkStatus();
}

// One refused report (its sequence has ended, say) must not take the others
// along: replays are ignored by the service, so all may be sent again.
void Reporter::SendOneByOne(const std::vector<v1::PlanReport>& reports) {
  for (const v1::PlanReport& report : reports) {
    const absl::Status status = Send({report});
    if (!status.ok() && !IsRefused(status)) return;
    if (!status.ok()) LogRefused(report, status);
    MutexLock lock(&mutex_);
    queue_.Pop(1, /*dropped=*/!status.ok());
    changed_.SignalAll();
  }
}

// Replays are ignored by the service: after a failure all parts come again.
absl::Status Reporter::SendBatch(const std::vector<v1::PlanReport>& reports) {
  if (reports.size() > 1) return Send(reports);
  for (const v1::PlanReport& part : SplitReport(reports[0], kMaxBatchBytes)) {
    HW_RETURN_IF_ERROR(Send({part}));
  }
  return absl::OkStatus();
}

absl::Status Reporter::Send(const std::vector<v1::PlanReport>& reports) {
  v1::ReportPlanRequest request;
  request.set_group(link_.options().group);
  request.set_rank(link_.options().rank);
  request.set_epoch(link_.epoch());
  for (const v1::PlanReport& report : reports) *request.add_reports() = report;
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kTimeout));
  v1::ReportPlanResponse response;
  const absl::Status status =
      FromGrpcStatus(link_.service()->group->ReportPlan(&context, request, &response));
  link_.Note(status);
  for (SequenceId sequence : response.unknown_sequence_ids()) {
    LogDebug("report of a sequence that has ended", {{"sequence", sequence}});
  }
  if (!absl::IsFailedPrecondition(status)) return status;
  // Taken nevertheless: the ranks' plans differ, which is for people to see.
  LogError("ranks disagree", {{"error", status.ToString()}});
  return absl::OkStatus();
}

}  // namespace heavywater
