// A real etcd for tests, on free ports of this machine, with a folder of its own.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/cache_service/child_server.h"

namespace heavywater {

class EtcdServer {
 public:
  // Null, with `reason`, where there is no etcd or it does not start. `options`: more
  // flags (certificates).
  static std::unique_ptr<EtcdServer> Start(std::string* reason,
                                           std::vector<std::string> options = {});
  ~EtcdServer();

  bool StartAgain(std::string* reason);  // with what it had, at the same address
  void Kill() { process_.Kill(); }
  void Pause() { process_.Pause(); }
  void Continue() { process_.Continue(); }

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  EtcdServer(int port, int peer_port, std::string folder, std::vector<std::string> options);

  const int port_;
  const int peer_port_;
  const std::string folder_;
  const std::vector<std::string> options_;
  ChildServer process_;
};

}  // namespace heavywater
