// A rank of a group with a model, from its readiness to its end: it serves, and when
// the group fails it forms the group again.
#pragma once

#include <atomic>
#include <thread>

#include "absl/status/status.h"
#include "cache_service/runtime/server_runtime.h"
#include "cache_service/runtime/shutdown_signal.h"
#include "heavywater/v1/config.pb.h"
#include "worker/server/connect_ranks.h"
#include "worker/server/generation_service.h"
#include "worker/server/stop_flag.h"
#include "worker/server/worker.h"
#include "worker/server/worker_metrics.h"

namespace heavywater {

// Forwards the signal to whoever waits for the group to form.
class SignalWatch {
 public:
  SignalWatch(ShutdownSignal& signal, StopFlag& stop);
  ~SignalWatch();

 private:
  std::atomic<bool> done_ = false;
  std::thread thread_;
};

// Until the signal (OK), or the group has failed and cannot form again. `service` is
// used by rank 0 only.
absl::Status ServeGeneration(const v1::WorkerConfig& config, const ModelFacts& facts,
                             const CommunicatorFactory& connect, Worker& worker,
                             WorkerMetrics& metrics, ServerRuntime& runtime,
                             GenerationService& service, ShutdownSignal& signal);

}  // namespace heavywater
