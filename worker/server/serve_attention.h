// A rank that engines drive, from its readiness to its end.
#pragma once

#include "absl/status/status.h"
#include "cache_service/runtime/server_runtime.h"
#include "cache_service/runtime/shutdown_signal.h"
#include "heavywater/v1/config.pb.h"
#include "worker/server/attention_service.h"
#include "worker/server/worker.h"
#include "worker/server/worker_metrics.h"

namespace heavywater {

// Until the signal, or an error: the group has failed. An engine's stream that is
// open at the signal gets drain_ms.
absl::Status ServeAttention(const v1::WorkerConfig& config, const ModelFacts& facts, Worker& worker,
                            WorkerMetrics& metrics, ServerRuntime& runtime,
                            AttentionService& service, ShutdownSignal& signal);

void UpdateLinkMetrics(Worker& worker, WorkerMetrics& metrics);

}  // namespace heavywater
