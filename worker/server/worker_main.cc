#include "worker/server/worker_main.h"

#include <atomic>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/base/version.h"
#include "cache_service/runtime/config_loader.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/server_runtime.h"
#include "cache_service/runtime/shutdown_signal.h"
#include "prometheus/registry.h"
#include "worker/server/attention_service.h"
#include "worker/server/engine_facts.h"
#include "worker/server/follower.h"
#include "worker/server/generation_service.h"
#include "worker/server/model_info.h"
#include "worker/server/policy_proto.h"
#include "worker/server/rank_zero.h"
#include "worker/server/serve_attention.h"
#include "worker/server/worker_config.h"

namespace heavywater {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(100);
// What the other ranks get, beyond drain_ms, to hear of the end from rank 0.
constexpr absl::Duration kFollowerGrace = absl::Seconds(2);
constexpr absl::Duration kFlushTimeout = absl::Seconds(2);

// Forwards the signal to whoever waits for the group to form.
class SignalWatch {
 public:
  SignalWatch(ShutdownSignal& signal, StopFlag& stop)
      : thread_([this, &signal, &stop] {
          while (!done_ && !signal.WaitFor(kPoll)) {
          }
          if (!done_) stop.Stop();
        }) {}
  ~SignalWatch() {
    done_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> done_ = false;
  std::thread thread_;
};

// The rank's own loop on a thread: rank 0 schedules, the others follow.
class StepThread {
 public:
  template <typename Loop>
  explicit StepThread(Loop loop)
      : thread_([this, loop] {
          status_ = loop();
          ended_ = true;
        }) {}
  ~StepThread() { Join().IgnoreError(); }
  bool ended() const { return ended_; }
  absl::Status Join() {
    if (thread_.joinable()) thread_.join();
    return status_;
  }

 private:
  absl::Status status_;
  std::atomic<bool> ended_ = false;
  std::thread thread_;
};

absl::Status Lead(const v1::WorkerConfig& config, const ModelFacts& facts, Worker& worker,
                  WorkerMetrics& metrics, ServerRuntime& runtime, GenerationService& service,
                  ShutdownSignal& signal) {
  HW_ASSIGN_OR_RETURN(const OnHostFull on_host_full, ParseOnHostFull(config.on_host_full()));
  RankZero rank_zero(config, facts, on_host_full, worker, metrics);
  StepThread step([&] { return rank_zero.scheduler().Run(); });
  service.Serve(rank_zero.engine());
  runtime.SetReady(true);
  while (!step.ended() && !signal.WaitFor(kPoll)) UpdateLinkMetrics(worker, metrics);
  LogInfo("draining", {{"running", rank_zero.scheduler().num_running()}});
  runtime.BeginDrain();
  rank_zero.Refuse();
  runtime.Drain();
  rank_zero.scheduler().Stop();
  service.StopServing();
  return step.Join();
}

absl::Status Follow(const v1::WorkerConfig& config, Worker& worker, WorkerMetrics& metrics,
                    ServerRuntime& runtime, ShutdownSignal& signal) {
  StepThread step([&] {
    return RunFollower(worker.runner(), metrics, absl::Milliseconds(config.comm_timeout_ms()));
  });
  runtime.SetReady(true);
  while (!step.ended() && !signal.WaitFor(kPoll)) UpdateLinkMetrics(worker, metrics);
  runtime.BeginDrain();
  // Rank 0 was told to stop, too, as a rule, and ends the group in order.
  const absl::Time deadline = absl::Now() + absl::Milliseconds(config.drain_ms()) + kFollowerGrace;
  while (!step.ended() && absl::Now() < deadline) absl::SleepFor(kPoll);
  const bool in_order = step.ended();
  if (!in_order) {
    worker.runner().communicator().Abort(absl::CancelledError("this rank was told to stop"));
  }
  const absl::Status status = step.Join();
  runtime.Drain();
  return in_order ? status : absl::OkStatus();
}

absl::Status Serve(const v1::WorkerConfig& config, const CommunicatorFactory& connect,
                   ShutdownSignal& signal) {
  HW_ASSIGN_OR_RETURN(const ModelFacts facts, ReadModelFacts(config));
  auto registry = std::make_shared<prometheus::Registry>();
  WorkerMetrics metrics(registry);
  const bool engines = ServesEngines(config);
  std::vector<v1::GetModelResponse> model;
  if (!engines) {
    const TokenizerSpec& tokenizer = facts.tokenizer->spec();
    model = MakeModelMessages(MakeModelInfo(facts.config, tokenizer, facts.fingerprint,
                                            config.size(), config.default_policy()),
                              tokenizer);
  }
  GenerationService service(std::move(model));
  AttentionService attention;
  std::vector<grpc::Service*> services;
  if (engines) services.push_back(&attention);
  if (!engines && config.rank() == 0) services.push_back(&service);
  HW_ASSIGN_OR_RETURN(const std::unique_ptr<ServerRuntime> runtime,
                      ServerRuntime::Start({.listen_address = config.listen_address(),
                                            .metrics_address = config.metrics_address(),
                                            .drain = absl::Milliseconds(config.drain_ms())},
                                           services, registry));
  runtime->PrintAddresses();
  const std::string& advertised =
      config.advertised_address().empty() ? runtime->address() : config.advertised_address();
  std::unique_ptr<Worker> worker;
  {
    StopFlag stop;
    SignalWatch watch(signal, stop);
    auto created = Worker::Create(config, facts, advertised, connect, stop);
    if (absl::IsCancelled(created.status())) return absl::OkStatus();
    HW_ASSIGN_OR_RETURN(worker, std::move(created));
  }
  LogInfo("ready", {{"rank", config.rank()}, {"size", config.size()}});
  if (engines) {
    const absl::Status status =
        ServeAttention(config, facts, *worker, metrics, *runtime, attention, signal);
    worker->Flush(kFlushTimeout);
    worker->Leave();
    return status;
  }
  const absl::Status status = config.rank() == 0
                                  ? Lead(config, facts, *worker, metrics, *runtime, service, signal)
                                  : Follow(config, *worker, metrics, *runtime, signal);
  worker->Flush(kFlushTimeout);
  // Nobody tears down a connection that another rank still uses, nor leaves the
  // group while another rank still reports to it: the first to leave ends it.
  if (status.ok()) worker->runner().communicator().Barrier().IgnoreError();
  worker->Leave();
  return status;
}

}  // namespace

int WorkerMain(int argc, char** argv, const CommunicatorFactory& connect) {
  ShutdownSignal signal;
  v1::WorkerConfig config = DefaultWorkerConfig();
  const auto flags = ParseFlags(argc, argv, config);
  if (flags.ok() && flags->show_version) {
    std::printf("heavywater-worker %s\n", kVersion);
    return 0;
  }
  if (flags.ok() && flags->show_help) {
    std::printf("%s", ConfigHelp("heavywater-worker", config).c_str());
    return 0;
  }
  absl::Status status = flags.status();
  if (status.ok()) status = LoadConfig(flags->config_path, flags->overrides, &config);
  if (status.ok()) status = CheckWorkerConfig(config);
  if (status.ok()) {
    status = InitLogging({.level = config.log_level(),
                          .json = config.log_json(),
                          .process = absl::StrCat("heavywater-worker/", config.rank())});
  }
  if (!status.ok()) {
    std::fprintf(stderr, "heavywater-worker: %s\n", std::string(status.message()).c_str());
    return 2;
  }
  status = Serve(config, connect, signal);
  if (!status.ok()) {
    LogError("worker failed", {{"error", status.ToString()}});
    return 1;
  }
  LogInfo("stopped");
  return 0;
}

}  // namespace heavywater
