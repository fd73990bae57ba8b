// A program that answers lines with lines, on its standard input and output.
#pragma once

#include <sys/types.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace heavywater {

class LineProcess {
 public:
  // `command[0]` is looked for on PATH; standard error is this process'. What cannot be
  // started ends at once: the first Read() tells.
  static absl::StatusOr<std::unique_ptr<LineProcess>> Start(std::vector<std::string> command);
  // Ends its input, asks it to stop (SIGTERM) and waits for its end. It dies with this
  // process, too.
  ~LineProcess();
  LineProcess(const LineProcess&) = delete;
  LineProcess& operator=(const LineProcess&) = delete;

  // Its next line, without the end. UNAVAILABLE once it has ended.
  absl::StatusOr<std::string> Read();
  // Writes a line, and reads the next.
  absl::StatusOr<std::string> Ask(const std::string& line);

 private:
  LineProcess(pid_t pid, int input, int output) : pid_(pid), input_(input), output_(output) {}

  const pid_t pid_;
  const int input_;    // written here
  const int output_;   // read from
  std::string ahead_;  // read, beyond the last line
};

}  // namespace heavywater
