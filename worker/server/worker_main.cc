#include "worker/server/worker_main.h"

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/base/version.h"
#include "cache_service/runtime/config_loader.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/server_runtime.h"
#include "cache_service/runtime/server_security.h"
#include "cache_service/runtime/shutdown_signal.h"
#include "prometheus/registry.h"
#include "worker/server/attention_service.h"
#include "worker/server/engine_facts.h"
#include "worker/server/generation_service.h"
#include "worker/server/model_info.h"
#include "worker/server/serve_attention.h"
#include "worker/server/serve_generation.h"
#include "worker/server/worker_config.h"

namespace heavywater {
namespace {

constexpr absl::Duration kFlushTimeout = absl::Seconds(2);

absl::Status Serve(const v1::WorkerConfig& config, const CommunicatorFactory& connect,
                   ShutdownSignal& signal) {
  HW_ASSIGN_OR_RETURN(const ModelFacts facts, ReadModelFacts(config));
  auto registry = std::make_shared<prometheus::Registry>();
  HW_ASSIGN_OR_RETURN(const auto security,
                      ServerSecurity::Create(ServerSecurityOf(config), registry));
  WorkerMetrics metrics(registry);
  const bool engines = ServesEngines(config);
  std::vector<v1::GetModelResponse> model;
  if (!engines) {
    const TokenizerSpec& tokenizer = facts.tokenizer->spec();
    model = MakeModelMessages(MakeModelInfo(facts.config, tokenizer, facts.fingerprint,
                                            config.size(), config.default_policy()),
                              tokenizer);
  }
  GenerationService service(
      std::move(model),
      [&config] {
        return absl::StrCat("group \"", config.group(), "\" of ", config.size(),
                            " ranks is not complete: rank 0 has begun and waits for the others");
      },
      &security->access());
  AttentionService attention;
  std::vector<grpc::Service*> services;
  if (engines) services.push_back(&attention);
  if (!engines && config.rank() == 0) services.push_back(&service);
  HW_ASSIGN_OR_RETURN(
      const std::unique_ptr<ServerRuntime> runtime,
      ServerRuntime::Start({.listen_address = config.listen_address(),
                            .metrics_address = config.metrics_address(),
                            .drain = absl::Milliseconds(config.drain_ms()),
                            .max_connections = config.max_connections(),
                            .max_connections_per_peer = config.max_connections_per_peer(),
                            .max_calls_per_connection = config.max_calls_per_connection(),
                            .security = security.get()},
                           services, registry));
  runtime->PrintAddresses();
  const std::string& advertised =
      config.advertised_address().empty() ? runtime->address() : config.advertised_address();
  std::unique_ptr<Worker> worker;
  {
    StopFlag stop;
    SignalWatch watch(signal, stop);
    auto created = Worker::Create(config, facts, advertised, connect, stop);
    if (!created.ok() && stop.stopped()) {
      LogInfo("stopped while the group forms", {{"status", created.status().ToString()}});
      return absl::OkStatus();
    }
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
  const absl::Status status =
      ServeGeneration(config, facts, connect, *worker, metrics, *runtime, service, signal);
  worker->Flush(kFlushTimeout);
  // Nobody tears down a connection that another rank still uses, nor leaves the
  // group while another rank still reports to it: the first to leave ends it.
  if (status.ok() && worker->formed()) worker->runner().communicator().Barrier().IgnoreError();
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
  if (flags->check_config) {
    std::printf("%s", ConfigToYaml(config).c_str());
    return 0;
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
