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

struct ConnectionLimits {
  int64_t all = 10'000;     // open at a time
  int64_t of_one_peer = 0;  // of them, from one address; 0: all
};

// Listens at once, accepts from Run() to Stop().
class ConnectionAcceptor {
 public:
  // Takes the descriptor of a connection over. `listener` is only good for naming it.
  using Handle = std::function<void(int listener, int connection)>;

  // `address`: HOST:PORT; port 0 picks one. Beyond the limits new connections are closed at
  // once, counted (heavywater_connections_refused_total) and logged.
  // INVALID_ARGUMENT: no such host; UNAVAILABLE naming an address that cannot be bound.
  static absl::StatusOr<std::unique_ptr<ConnectionAcceptor>> Listen(const std::string& address,
                                                                    const ConnectionLimits& limits,
                                                                    prometheus::Registry& metrics);
  ~ConnectionAcceptor();
  ConnectionAcceptor(const ConnectionAcceptor&) = delete;
  ConnectionAcceptor& operator=(const ConnectionAcceptor&) = delete;

  int port() const { return port_; }
  void Run(Handle handle);
  // Nobody can connect any more. Idempotent.
  void Stop();

 private:
  struct Open {
    uint64_t socket = 0;  // that it was when it was handed over
    std::string peer;     // its address, without the port
  };

  ConnectionAcceptor(int listener, int port, const ConnectionLimits& limits,
                     prometheus::Counter& refused);
  void Loop();
  void Take(int connection, const std::string& peer);
  // Which limit leaves it no room; null: it has some.
  const char* FullLimit(const std::string& peer) const;
  bool HasRoom(const std::string& peer);
  void ForgetClosed();
  void Forget(int connection);

  const int listener_;
  const int port_;
  const ConnectionLimits limits_;
  prometheus::Counter& refused_;
  LogLimit log_limit_;
  int wake_ = -1;
  std::atomic<bool> stopped_ = false;
  Handle handle_;
  // Of the thread: by descriptor. One that is another file by now, or none, is closed.
  std::unordered_map<int, Open> open_;
  std::unordered_map<std::string, int64_t> of_peer_;  // how many of open_; never 0
  absl::Time looked_ = absl::InfinitePast();          // which of them are closed
  std::thread thread_;
};

// Lets the process have as many descriptors as it may, and returns how many connections
// that is, up to `wanted`.
int64_t RoomForConnections(int64_t wanted);

}  // namespace heavywater
