#include "tests/cache_service/child_server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

constexpr int kMaxTries = 400;
constexpr int kTryMicroseconds = 50'000;
constexpr int kNotFound = 127;

[[noreturn]] void Execute(std::vector<std::string> arguments) {
  const int null = open("/dev/null", O_RDWR);
  dup2(null, STDOUT_FILENO);
  dup2(null, STDERR_FILENO);
  std::vector<char*> pointers;
  for (std::string& argument : arguments) pointers.push_back(argument.data());
  pointers.push_back(nullptr);
  execvp(pointers[0], pointers.data());
  _exit(kNotFound);
}

}  // namespace

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

bool ChildServer::Start(const std::vector<std::string>& arguments,
                        const std::function<bool()>& answers, std::string* reason) {
  pid_ = fork();
  if (pid_ == 0) Execute(arguments);
  for (int tries = 0; tries < kMaxTries; ++tries) {
    int status = 0;
    if (waitpid(pid_, &status, WNOHANG) == pid_) {
      pid_ = 0;
      const bool missing = WIFEXITED(status) && WEXITSTATUS(status) == kNotFound;
      *reason = absl::StrCat(arguments[0], missing ? " is not installed" : " did not start");
      return false;
    }
    if (answers()) return true;
    usleep(kTryMicroseconds);
  }
  *reason = absl::StrCat(arguments[0], " does not answer");
  return false;
}

void ChildServer::Kill() {
  if (pid_ <= 0) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
  pid_ = 0;
}

void ChildServer::Pause() {
  kill(pid_, SIGSTOP);
  siginfo_t info;
  waitid(P_PID, pid_, &info, WSTOPPED | WEXITED | WNOWAIT);  // until all its threads have stopped
}
void ChildServer::Continue() { kill(pid_, SIGCONT); }

}  // namespace heavywater
