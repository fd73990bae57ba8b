#include "tests/cache_service/etcd/etcd_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

sockaddr_in Loopback(int port) {
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<uint16_t>(port));
  return address;
}

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = Loopback(0);
  socklen_t bytes = sizeof(address);
  int port = 0;
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), bytes) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes) == 0) {
    port = ntohs(address.sin_port);
  }
  close(fd);
  return port;
}

// It listens for clients once it has a leader: itself.
bool Listens(int port) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  const sockaddr_in address = Loopback(port);
  const bool connected =
      connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0;
  close(fd);
  return connected;
}

[[noreturn]] void Execute(std::vector<std::string> arguments) {
  const int null = open("/dev/null", O_RDWR);
  dup2(null, STDOUT_FILENO);
  dup2(null, STDERR_FILENO);
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  execvp("etcd", pointers.data());
  _exit(127);
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
  pid_ = fork();
  if (pid_ == 0) Execute(std::move(arguments));
  for (int tries = 0; tries < 400; ++tries) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = 0;
      const bool missing = WIFEXITED(status) && WEXITSTATUS(status) == 127;
      *reason = missing ? "etcd is not installed" : "etcd did not start";
      return false;
    }
    if (Listens(port_)) return true;
    usleep(50'000);
  }
  *reason = absl::StrCat("etcd does not listen on port ", port_);
  return false;
}

EtcdServer::~EtcdServer() {
  Kill();
  std::filesystem::remove_all(folder_);
}

void EtcdServer::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = 0;
}

void EtcdServer::Pause() { kill(pid_, SIGSTOP); }
void EtcdServer::Continue() { kill(pid_, SIGCONT); }

}  // namespace heavywater
