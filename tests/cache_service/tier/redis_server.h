// A real Redis for tests, on a free port of this machine.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cache_service/tier/redis_connection.h"
#include "tests/cache_service/child_server.h"

namespace heavywater {

class RedisServer {
 public:
  // Null, with `reason`, where there is no redis-server or it does not start. `port` 0
  // picks a free one.
  static std::unique_ptr<RedisServer> Start(std::string* reason, int port = 0);
  // With arguments of its own beside the defaults ("--requirepass", ...), to which `caller`
  // is who is let in: its host and port are set here. TLS where `caller` has it.
  static std::unique_ptr<RedisServer> Start(std::string* reason,
                                            const std::vector<std::string>& arguments,
                                            RedisEndpoint caller, int port = 0);
  ~RedisServer();

  void Kill() { process_.Kill(); }
  void Pause() { process_.Pause(); }
  void Continue() { process_.Continue(); }

  int port() const { return port_; }
  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  RedisServer(int port, std::string folder);

  ChildServer process_;
  const int port_;
  const std::string folder_;
};

}  // namespace heavywater
