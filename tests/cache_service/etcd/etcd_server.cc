#include "tests/cache_service/etcd/etcd_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

// It listens for clients once it has a leader: itself.
bool Listens(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  const bool connected =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return connected;
}

}  // namespace

EtcdServer::EtcdServer(int port, int peer_port, std::string folder,
                       std::vector<std::string> options)
    : port_(port),
      peer_port_(peer_port),
      folder_(std::move(folder)),
      options_(std::move(options)) {}

std::unique_ptr<EtcdServer> EtcdServer::Start(std::string* reason,
                                              std::vector<std::string> options) {
  const int port = FreePort();
  const std::string folder = (std::filesystem::temp_directory_path() /
                              absl::StrCat("heavywater-etcd-", getpid(), "-", port))
                                 .string();
  std::unique_ptr<EtcdServer> server(new EtcdServer(port, FreePort(), folder, std::move(options)));
  if (!server->StartAgain(reason)) return nullptr;
  return server;
}

bool EtcdServer::StartAgain(std::string* reason) {
  const bool tls = !options_.empty();
  const std::string client = absl::StrCat(tls ? "https" : "http", "://", address());
  const std::string peer = absl::StrCat("http://127.0.0.1:", peer_port_);
  std::vector<std::string> arguments = {
      "etcd", "--name=test", "--data-dir=" + folder_, "--listen-client-urls=" + client,
      "--advertise-client-urls=" + client, "--listen-peer-urls=" + peer,
      "--initial-advertise-peer-urls=" + peer, "--initial-cluster=test=" + peer,
      // It elects itself sooner.
      "--heartbeat-interval=50", "--election-timeout=250"};
  arguments.insert(arguments.end(), options_.begin(), options_.end());
  return process_.Start(
      arguments, [this] { return Listens(port_); }, reason);
}

EtcdServer::~EtcdServer() {
  Kill();
  std::filesystem::remove_all(folder_);
}

}  // namespace heavywater
