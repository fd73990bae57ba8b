#include "tests/bench/line_process.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

absl::Status ErrnoStatus(const char* what) {
  return absl::InternalError(absl::StrCat(what, ": ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<LineProcess>> LineProcess::Start(std::vector<std::string> command) {
  int input[2];
  int output[2];
  if (pipe2(input, O_CLOEXEC) != 0) return ErrnoStatus("pipe2");
  if (pipe2(output, O_CLOEXEC) != 0) return ErrnoStatus("pipe2");
  signal(SIGPIPE, SIG_IGN);  // a program that has ended shows as an error
  std::vector<char*> arguments;
  for (std::string& argument : command) arguments.push_back(argument.data());
  arguments.push_back(nullptr);
  const pid_t pid = fork();
  if (pid < 0) return ErrnoStatus("fork");
  if (pid == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(input[0], STDIN_FILENO);
    dup2(output[1], STDOUT_FILENO);
    execvp(arguments[0], arguments.data());
    _exit(127);
  }
  close(input[0]);
  close(output[1]);
  return std::unique_ptr<LineProcess>(new LineProcess(pid, input[1], output[0]));
}

LineProcess::~LineProcess() {
  close(input_);
  close(output_);
  kill(pid_, SIGTERM);
  while (waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

absl::StatusOr<std::string> LineProcess::Ask(const std::string& line) {
  const std::string sent = line + "\n";
  for (size_t at = 0; at < sent.size();) {
    const ssize_t count = write(input_, sent.data() + at, sent.size() - at);
    if (count < 0 && errno != EINTR) break;
    if (count > 0) at += static_cast<size_t>(count);
  }
  return Read();
}

absl::StatusOr<std::string> LineProcess::Read() {
  while (true) {
    const size_t end = ahead_.find('\n');
    if (end != std::string::npos) {
      const std::string line = ahead_.substr(0, end);
      ahead_.erase(0, end + 1);
      return line;
    }
    char part[4096];
    const ssize_t count = read(output_, part, sizeof(part));
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return absl::UnavailableError("the program has ended");
    ahead_.append(part, static_cast<size_t>(count));
  }
}

}  // namespace heavywater
