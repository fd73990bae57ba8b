#include "cache_service/runtime/server_runtime.h"

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>
#include <prometheus/registry.h>

#include <cstdio>
#include <mutex>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/audit.h"
#include "cache_service/runtime/connection_acceptor.h"
#include "cache_service/runtime/log_limit.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/metrics_exposer.h"
#include "cache_service/runtime/rpc_metrics.h"
#include "cache_service/runtime/server_security.h"

namespace heavywater {
namespace {

// What calls that outlive the drain get to notice that they were cancelled.
constexpr absl::Duration kCancelGrace = absl::Milliseconds(200);
constexpr absl::Duration kDrainPoll = absl::Milliseconds(10);
// Who has not finished its handshake by then is cut off.
constexpr absl::Duration kHandshakeTimeout = absl::Seconds(10);

// "127.0.0.1:0" and 4242 -> "127.0.0.1:4242".
std::string WithPort(const std::string& address, int port) {
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

// gRPC has a line for each handshake that fails: whoever connects could fill the log.
void LogGrpc(gpr_log_func_args* line) {
  static auto* const limit = new LogLimit(/*per_second=*/10);
  const std::optional<int64_t> suppressed = limit->Allow(absl::Now());
  if (!suppressed.has_value()) return;
  LogWarn("gRPC", {{"message", line->message}, {"not_logged_before", *suppressed}});
}

// A machine that vanishes closes nothing: whoever has a call open asks the other end now
// and then whether it is there. Clients do, too, and gRPC would take offence at more than
// one question in five minutes.
void WatchConnections(grpc::ServerBuilder& builder) {
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10'000);
  // Connections are counted (max_connections): none stays for ever without a call.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, 300'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1000);
}

void PrepareGrpc() {
  static std::once_flag once;
  std::call_once(once, [] {
    gpr_set_log_function(LogGrpc);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

}  // namespace

absl::StatusOr<std::unique_ptr<ServerRuntime>> ServerRuntime::Start(
    const ServerRuntimeOptions& options, const std::vector<grpc::Service*>& services,
    std::shared_ptr<prometheus::Registry> metrics) {
  if (options.security == nullptr) {
    HW_RETURN_IF_ERROR(CheckServerSecurity({.listen_address = options.listen_address}));
  }
  PrepareGrpc();
  auto runtime = std::unique_ptr<ServerRuntime>(new ServerRuntime);
  runtime->options_ = options;
  if (!options.metrics_address.empty()) {
    HW_ASSIGN_OR_RETURN(runtime->exposer_, MetricsExposer::Start(options.metrics_address));
    runtime->exposer_->Add(metrics);
  }

  grpc::ServerBuilder builder;
  HW_ASSIGN_OR_RETURN(
      runtime->connections_,
      ConnectionAcceptor::Listen(options.listen_address,
                                 {.all = RoomForConnections(options.max_connections),
                                  .of_one_peer = options.max_connections_per_peer},
                                 *metrics));
  // gRPC is given connections instead of an address.
  const std::shared_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor =
      builder.experimental().AddExternalConnectionAcceptor(
          grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD,
          options.security == nullptr ? grpc::InsecureServerCredentials()
                                      : options.security->credentials());
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS,
                             static_cast<int>(absl::ToInt64Milliseconds(kHandshakeTimeout)));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.max_calls_per_connection);
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  WatchConnections(builder);
  for (grpc::Service* service : services) builder.RegisterService(service);
  runtime->calls_ = std::make_shared<std::atomic<int64_t>>(0);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(MakeRpcMetrics(metrics, runtime->calls_));
  if (options.security != nullptr && options.security->access().has_tokens()) {
    interceptors.push_back(MakeAudit(options.security->access()));
  }
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  runtime->server_ = builder.BuildAndStart();
  if (runtime->server_ == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("a server at listen_address ", options.listen_address, " cannot be started"));
  }
  runtime->connections_->Run([acceptor](int listener, int connection) {
    grpc::experimental::ExternalConnectionAcceptor::NewConnectionParameters parameters;
    parameters.listener_fd = listener;
    parameters.fd = connection;
    acceptor->HandleNewConnection(&parameters);
  });
  runtime->address_ = WithPort(options.listen_address, runtime->connections_->port());
  grpc::HealthCheckServiceInterface* health = runtime->server_->GetHealthCheckService();
  health->SetServingStatus("liveness", true);
  health->SetServingStatus("readiness", false);
  return runtime;
}

ServerRuntime::~ServerRuntime() {
  if (server_ == nullptr || shut_down_) return;
  connections_->Stop();
  server_->Shutdown(std::chrono::system_clock::now());
}

const std::string& ServerRuntime::metrics_address() const {
  static const std::string* const off = new std::string;
  return exposer_ == nullptr ? *off : exposer_->address();
}

void ServerRuntime::PrintAddresses() const {
  std::printf("listening on %s\n", address_.c_str());
  if (exposer_ != nullptr) std::printf("metrics on %s\n", exposer_->address().c_str());
  std::fflush(stdout);
}

void ServerRuntime::AddMetrics(std::shared_ptr<prometheus::Collectable> collectable) {
  if (exposer_ != nullptr) exposer_->Add(std::move(collectable));
}

void ServerRuntime::SetReady(bool ready) {
  server_->GetHealthCheckService()->SetServingStatus("readiness", ready && !draining_);
}

void ServerRuntime::BeginDrain() {
  draining_ = true;
  SetReady(false);
}

void ServerRuntime::Drain(bool wait_for_calls) {
  if (shut_down_.exchange(true)) return;
  BeginDrain();
  // The server still answers meanwhile: health says "not ready", services say
  // UNAVAILABLE because draining() is true.
  const absl::Time deadline =
      absl::Now() + (wait_for_calls ? options_.drain : absl::ZeroDuration());
  while (*calls_ > 0 && absl::Now() < deadline) absl::SleepFor(kDrainPoll);
  if (*calls_ > 0)
    LogWarn("calls outlived the drain and are cancelled", {{"calls", calls_->load()}});
  connections_->Stop();
  server_->Shutdown(absl::ToChronoTime(absl::Now() + kCancelGrace));
}

}  // namespace heavywater
