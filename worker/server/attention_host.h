// AttentionService without gRPC: one rank that engines drive.
#pragma once

#include <atomic>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"
#include "heavywater/v1/attention.pb.h"
#include "worker/comm/communicator.h"
#include "worker/rank/attention_engine.h"
#include "worker/server/memory_check.h"
#include "worker/server/plan_reports.h"
#include "worker/server/remote_host_tier.h"
#include "worker/server/sequence_client.h"
#include "worker/server/worker_metrics.h"

namespace heavywater {

struct AttentionHostOptions {
  std::string group;
  v1::Fingerprint fingerprint;
  std::string default_policy;
  OnHostFull on_host_full = OnHostFull::kStop;
  int report_interval_plans = 16;  // plans between reports of whole sets
};

// Thread safe: calls run one at a time, and one that waits for other ranks holds up
// the rest.
class AttentionHost {
 public:
  // All outlive this; `link` and `tier` are null without a cache service.
  AttentionHost(AttentionHostOptions options, AttentionEngine& engine, Communicator& communicator,
                PlanReports& reports, CacheLink* link, RemoteHostTier* tier,
                WorkerMetrics& metrics);

  // As AttentionService says.
  absl::StatusOr<v1::AttachEngineResponse> Attach(const v1::AttachEngineRequest& request);
  absl::Status BeginStream(uint64_t attachment_id);
  // An error ends the stream; what is refused goes in the response.
  absl::Status Handle(const v1::StepRequest& request, v1::StepResponse& response);
  // Closes the stream's sequences.
  void EndStream();
  absl::StatusOr<std::vector<v1::KeptResponse>> Kept(const v1::KeptRequest& request);
  // Up to a chunk of rows from `first_position` on.
  absl::StatusOr<v1::ReadKvResponse> ReadKv(const v1::ReadKvRequest& request,
                                            int64_t first_position);

  int64_t row_bytes() const { return shape().row_bytes(); }

  // These wait for nothing. New attachments, streams and sequences are UNAVAILABLE
  // from now on.
  void Refuse() { refusing_ = true; }
  bool stream_open() const { return stream_open_; }
  // The communicator has failed: nothing runs any more.
  bool group_failed() const { return group_failed_; }

 private:
  absl::Status CheckAttach(const v1::AttachEngineRequest& request) const;
  absl::Status CheckRefusing() const;
  absl::Status Answer(const v1::StepRequest& request, v1::StepResponse& response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Open(const v1::OpenAttention& open, v1::OpenedAttention& opened)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Rank 0 opens the sequence at the cache service and tells the others. A collective.
  absl::StatusOr<OpenedSequence> Register(const SequenceToOpen& sequence)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status OpenInCache(const OpenedSequence& registered, const SequenceOptions& options)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Begin(const v1::BeginStep& begin, v1::BegunStep& begun)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Attend(const v1::AttendLayer& attend, v1::AttendedLayer& attended)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status End(v1::EndedStep& ended) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Reports and counts what a step that has ended did.
  absl::Status AfterItem(int item) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status Close(SequenceId sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckOpen(SequenceId sequence) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int OwnHead(int kv_head) const { return kv_head - shape().first_kv_head; }
  const RankCacheOptions& cache_options() const { return engine_.cache().options(); }
  const KvShape& shape() const { return cache_options().shape; }

  const AttentionHostOptions options_;
  AttentionEngine& engine_;
  Communicator& communicator_;
  PlanReports& reports_;
  SequenceClient sequences_;
  RemoteHostTier* const tier_;
  WorkerMetrics& metrics_;
  const MemoryCheck memory_;

  std::atomic<bool> refusing_ = false;
  std::atomic<bool> stream_open_ = false;
  std::atomic<bool> group_failed_ = false;
  Mutex mutex_;
  uint64_t attachment_id_ ABSL_GUARDED_BY(mutex_) = 0;  // 0: none
  std::set<SequenceId> open_ ABSL_GUARDED_BY(mutex_);
  absl::Duration step_time_ ABSL_GUARDED_BY(mutex_);
  absl::Status group_status_ ABSL_GUARDED_BY(mutex_);  // of collectives outside the engine's
};

}  // namespace heavywater
