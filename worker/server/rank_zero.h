// What only rank 0 has: admission, scheduling, generation.
#pragma once

#include "heavywater/v1/config.pb.h"
#include "worker/server/admission_queue.h"
#include "worker/server/generation_engine.h"
#include "worker/server/memory_check.h"
#include "worker/server/scheduler.h"
#include "worker/server/sequence_client.h"
#include "worker/server/worker.h"
#include "worker/server/worker_metrics.h"

namespace heavywater {

class RankZero {
 public:
  // All outlive this.
  RankZero(const v1::WorkerConfig& config, const ModelFacts& facts, OnHostFull on_host_full,
           Worker& worker, WorkerMetrics& metrics);

  ~RankZero();

  GenerationEngine& engine() { return engine_; }
  Scheduler& scheduler() { return scheduler_; }
  size_t num_queued() const { return queue_.size(); }
  // New requests are UNAVAILABLE from now on.
  void Refuse() { queue_.Close(absl::UnavailableError("the worker is draining")); }

 private:
  AdmissionQueue queue_;
  MemoryCheck memory_;
  SequenceClient sequences_;
  GenerationEngine engine_;
  Scheduler scheduler_;
  CacheLink* const link_;  // null: there is no cache service
};

}  // namespace heavywater
