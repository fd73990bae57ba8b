#include "worker/server/serve_attention.h"

#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"
#include "worker/server/policy_proto.h"

namespace heavywater {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(100);

}  // namespace

void UpdateLinkMetrics(Worker& worker, WorkerMetrics& metrics) {
  if (worker.link() == nullptr) return;
  metrics.SetLink(worker.link()->up(), worker.reporter()->queued(), worker.reporter()->dropped());
}

absl::Status ServeAttention(const v1::WorkerConfig& config, const ModelFacts& facts, Worker& worker,
                            WorkerMetrics& metrics, ServerRuntime& runtime,
                            AttentionService& service, ShutdownSignal& signal) {
  HW_ASSIGN_OR_RETURN(const OnHostFull on_host_full, ParseOnHostFull(config.on_host_full()));
  AttentionHost host({.group = config.group(),
                      .fingerprint = facts.fingerprint,
                      .default_policy = config.default_policy(),
                      .on_host_full = on_host_full,
                      .report_interval_plans = config.report_interval_plans()},
                     worker.engine(), worker.communicator(), worker.reports(), worker.link(),
                     worker.tier(), metrics);
  service.Serve(host);
  runtime.SetReady(true);
  const auto failed = [&] { return host.group_failed() || worker.peer_lost(); };
  bool told_to_stop = false;
  while (!failed() && !told_to_stop) {
    told_to_stop = signal.WaitFor(kPoll);
    UpdateLinkMetrics(worker, metrics);
  }
  const bool group_failed = failed();
  runtime.BeginDrain();
  host.Refuse();
  const absl::Time deadline = absl::Now() + absl::Milliseconds(config.drain_ms());
  while (host.stream_open() && !failed() && absl::Now() < deadline) absl::SleepFor(kPoll);
  // A call that waits for other ranks ends, too.
  if (host.stream_open()) {
    worker.communicator().Abort(absl::CancelledError("this rank was told to stop"));
  }
  // Nobody can go on with what has failed: an open stream is not waited for.
  runtime.Drain(/*wait_for_calls=*/!group_failed);
  service.StopServing();
  if (!group_failed) return absl::OkStatus();
  return absl::UnavailableError("the worker group failed: another rank has gone or disagrees");
}

}  // namespace heavywater
