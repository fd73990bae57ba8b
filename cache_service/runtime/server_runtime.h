// What every server of the project does around its services: bind, health,
// reflection, RPC metrics, and a shutdown that ends within its grace period.
//
//   ShutdownSignal signal;                    // first thing in main()
//   InitLogging({...});
//   auto runtime = ServerRuntime::Start(options, {&service_a, &service_b}, metrics);
//   (*runtime)->PrintAddresses();             // "listening on ..." on stdout
//   (*runtime)->SetReady(true);
//   while (!signal.WaitFor(absl::Milliseconds(100))) { periodic work }
//   (*runtime)->BeginDrain();                 // readiness off; services refuse new calls
//   ... end what waits ...
//   (*runtime)->Drain();                      // wait for calls in flight, cancel the rest
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace grpc {
class Server;
class Service;
}  // namespace grpc
namespace prometheus {
class Collectable;
class Registry;
}  // namespace prometheus

namespace heavywater {

class ConnectionAcceptor;
class MetricsExposer;
class ServerSecurity;

struct ServerRuntimeOptions {
  std::string listen_address = {};          // host:port; port 0 picks one
  std::string metrics_address = {};         // host:port of the Prometheus endpoint; empty = off
  absl::Duration drain = absl::Seconds(5);  // for calls in flight, at Drain()
  int max_message_bytes = 4 << 20;       // larger requests are RESOURCE_EXHAUSTED naming the limit
  int64_t max_connections = 10'000;      // at a time; more are closed as they come
  int64_t max_connections_per_peer = 0;  // of them, from one address; 0: all
  int max_calls_per_connection = 1000;   // at a time; more wait at their client
  // TLS and tokens; must outlive the runtime. Null: plaintext, on loopback only.
  const ServerSecurity* security = nullptr;
};

// Thread safe.
class ServerRuntime {
 public:
  // Binds and serves at once. Health: "" and "liveness" SERVING, "readiness"
  // NOT_SERVING until SetReady(true), any other name NOT_FOUND. The services
  // must outlive this object. UNAVAILABLE naming an address that cannot be bound;
  // INVALID_ARGUMENT for one that others can reach, without security.
  static absl::StatusOr<std::unique_ptr<ServerRuntime>> Start(
      const ServerRuntimeOptions& options, const std::vector<grpc::Service*>& services,
      std::shared_ptr<prometheus::Registry> metrics);
  ~ServerRuntime();
  ServerRuntime(const ServerRuntime&) = delete;
  ServerRuntime& operator=(const ServerRuntime&) = delete;

  // The addresses that were bound, with the real ports; empty metrics = off.
  const std::string& address() const { return address_; }
  const std::string& metrics_address() const;

  // "listening on ADDRESS" and "metrics on ADDRESS" on standard output, flushed.
  void PrintAddresses() const;

  // More families for the Prometheus endpoint.
  void AddMetrics(std::shared_ptr<prometheus::Collectable> collectable);

  void SetReady(bool ready);

  // Readiness off for good. Services ask draining() and answer new calls with
  // UNAVAILABLE; health goes on answering.
  void BeginDrain();
  bool draining() const { return draining_; }

  // BeginDrain(), then waits for calls in flight up to options.drain, cancels
  // what is left (open streams) and stops the server. Idempotent.
  // Without waiting: calls under way are cancelled at once.
  void Drain(bool wait_for_calls = true);

  // Of the underlying server, for in-process channels in tests.
  grpc::Server& server() { return *server_; }

 private:
  ServerRuntime() = default;

  ServerRuntimeOptions options_;
  std::string address_;
  std::unique_ptr<MetricsExposer> exposer_;  // null = off
  std::unique_ptr<ConnectionAcceptor> connections_;
  std::unique_ptr<grpc::Server> server_;
  std::shared_ptr<std::atomic<int64_t>> calls_;  // in flight, health and reflection excluded
  std::atomic<bool> draining_ = false;
  std::atomic<bool> shut_down_ = false;
};

}  // namespace heavywater
