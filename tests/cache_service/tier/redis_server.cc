#include "tests/cache_service/tier/redis_server.h"

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

int FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address = {};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t bytes = sizeof(address);
  int port = 0;
  if (bind(fd, reinterpret_cast<sockaddr*>(&address), bytes) == 0 &&
      getsockname(fd, reinterpret_cast<sockaddr*>(&address), &bytes) == 0) {
    port = ntohs(address.sin_port);
  }
  close(fd);
  return port;
}

bool Answers(const RedisEndpoint& caller) {
  auto connection = RedisConnection::Connect(caller);
  return connection.ok() && (*connection)->Send({"PING"}).ok() && (*connection)->Receive().ok();
}

[[noreturn]] void Execute(int port, bool tls, const std::string& folder,
                          const std::vector<std::string>& more) {
  const int null = open("/dev/null", O_RDWR);
  dup2(null, STDOUT_FILENO);
  const std::string number = std::to_string(port);
  std::vector<std::string> arguments = {"redis-server",
                                        "--port",
                                        tls ? "0" : number,
                                        "--tls-port",
                                        tls ? number : "0",
                                        "--bind",
                                        "127.0.0.1",
                                        "--save",
                                        "",
                                        "--appendonly",
                                        "no",
                                        "--dir",
                                        folder};
  arguments.insert(arguments.end(), more.begin(), more.end());
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  execvp(pointers[0], pointers.data());
  _exit(127);
}

}  // namespace

RedisServer::RedisServer(pid_t pid, int port, std::string folder)
    : pid_(pid), port_(port), folder_(std::move(folder)) {}

std::unique_ptr<RedisServer> RedisServer::Start(std::string* reason, int port) {
  return Start(reason, {}, {}, port);
}

std::unique_ptr<RedisServer> RedisServer::Start(std::string* reason,
                                                const std::vector<std::string>& arguments,
                                                RedisEndpoint caller, int port) {
  if (port == 0) port = FreePort();
  caller.host = "127.0.0.1";
  caller.port = port;
  const std::string folder = (std::filesystem::temp_directory_path() /
                              absl::StrCat("heavywater-redis-", getpid(), "-", port))
                                 .string();
  std::filesystem::create_directories(folder);
  const pid_t pid = fork();
  if (pid == 0) Execute(port, !caller.tls.ca_file.empty(), folder, arguments);
  std::unique_ptr<RedisServer> server(new RedisServer(pid, port, folder));
  for (int tries = 0; tries < 200; ++tries) {
    int status = 0;
    if (waitpid(pid, &status, WNOHANG) == pid) {
      server->pid_ = 0;
      const bool missing = WIFEXITED(status) && WEXITSTATUS(status) == 127;
      *reason = missing ? "redis-server is not installed" : "redis-server did not start";
      return nullptr;
    }
    if (Answers(caller)) return server;
    usleep(50'000);
  }
  *reason = absl::StrCat("redis-server does not answer on port ", port);
  return nullptr;
}

RedisServer::~RedisServer() {
  Kill();
  std::filesystem::remove_all(folder_);
}

void RedisServer::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = 0;
}

void RedisServer::Pause() { kill(pid_, SIGSTOP); }
void RedisServer::Continue() { kill(pid_, SIGCONT); }

}  // namespace heavywater
