// Sends reports of plans behind the step: the step only queues. What cannot be
// delivered waits, through an outage of the cache service, up to a bound.
#pragma once

#include <cstdint>
#include <memory>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"
#include "heavywater/v1/group.grpc.pb.h"
#include "worker/server/cache_link.h"
#include "worker/server/report_queue.h"

namespace heavywater {

struct ReporterOptions {
  size_t max_reports = 4096;
  int64_t max_bytes = int64_t{64} << 20;
};

// Thread safe. The link must outlive it.
class Reporter {
 public:
  using Options = ReporterOptions;
  Reporter(CacheLink& link, Options options);
  ~Reporter();

  // Returns at once.
  void Push(QueuedReport report);
  // Waits until all that was pushed has arrived or been dropped; false when it
  // takes longer than `timeout`.
  bool Flush(absl::Duration timeout);

  int64_t queued() const;
  int64_t dropped() const;

 private:
  void Run();
  // Sends the oldest reports; OK when there were none.
  absl::Status SendSome();
  // In parts where a single report exceeds a message.
  absl::Status SendBatch(const std::vector<v1::PlanReport>& reports);
  absl::Status Send(const std::vector<v1::PlanReport>& reports);
  void SendOneByOne(const std::vector<v1::PlanReport>& reports);

  CacheLink& link_;
  mutable Mutex mutex_;
  CondVar changed_;
  ReportQueue queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace heavywater
