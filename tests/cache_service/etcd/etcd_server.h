// A real etcd for tests, on free ports of this machine, with a folder of its own.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

namespace heavywater {

class EtcdServer {
 public:
  // Null, with `reason`, where there is no etcd or it does not start. `options`: more
  // flags (certificates).
  static std::unique_ptr<EtcdServer> Start(std::string* reason,
                                           std::vector<std::string> options = {});
  ~EtcdServer();

  void Kill();                           // kill -9
  bool StartAgain(std::string* reason);  // with what it had, at the same address
  void Pause();                          // it lives, and answers nothing
  void Continue();

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

 private:
  EtcdServer(int port, int peer_port, std::string folder, std::vector<std::string> options);

  const int port_;
  const int peer_port_;
  const std::string folder_;
  const std::vector<std::string> options_;
  pid_t pid_ = 0;
};

}  // namespace heavywater
