// Accepts a server's connections and bounds their number, which gRPC 1.51 cannot: it takes
// all that come, and where the process runs out of descriptors it stops listening for good.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/runtime/log_limit.h"

namespace prometheus {
class Counter;
class Registry;
}  // namespace prometheus

namespace heavywater {

// Listens at once, accepts from Run() to Stop().
class ConnectionAcceptor {
 public:
  // Takes the descriptor of a connection over. `listener` is only good for naming it.
  using Handle = std::function<void(int listener, int connection)>;

  // `address`: HOST:PORT; port 0 picks one. Beyond `max_connections` open ones, new ones are
  // closed at once, counted (heavywater_connections_refused_total) and logged.
  // INVALID_ARGUMENT: no such host; UNAVAILABLE naming an address that cannot be bound.
  static absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> Listen(const std::string& address,
                                                                    int64_t max_connections,
                                                                    prometheus::Registry& metrics);
  ~ConnectionAcceptor();
  ConnectionAcceptor(const ConnectionAcceptor&) = delete;
  ConnectionAcceptor& operator=(const ConnectionAcceptor&) = delete;

  int port() const { return port_; }
  void Run(Handle handle);
  // Nobody can connect any more. Idempotent.
  void Stop();

 private:
  ConnectionAcceptor(int listener, int port, int64_t max_connections, prometheus::Counter& refused);
  void Loop();
  void Take(int connection);
  bool HasRoom();

  const int listener_;
  const int port_;
  const int64_t max_connections_;
  prometheus::Counter& refused_;
  LogLimit log_limit_;
  int wake_ = -1;
  std::atomic<bool> stopped_ = false;
  Handle handle_;
  // Of the thread: by descriptor, the socket that it was when it was handed over. One that is
  // another file by now, or none, is closed.
  std::unordered_map<int, uint64_t> open_;
  absl::Time looked_ = absl::InfinitePast();  // which of them are closed
  std::thread thread_;
};

// Lets the process have as many descriptors as it may, and returns how many connections
// that is, up to `wanted`.
int64_t RoomForConnections(int64_t wanted);

}  // namespace heavywater
