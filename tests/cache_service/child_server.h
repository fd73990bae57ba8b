// A server of another project that a test starts as a process of its own, and ends.
#pragma once

#include <sys/types.h>

#include <functional>
#include <string>
#include <vector>

namespace heavywater {

int FreePort();  // of this machine's loopback

// One process at a time. What it prints goes nowhere.
class ChildServer {
 public:
  ChildServer() = default;
  ChildServer(const ChildServer&) = delete;
  ChildServer& operator=(const ChildServer&) = delete;
  ~ChildServer() { Kill(); }

  // arguments[0] is the program, found on PATH; returns once it `answers`. False, with
  // `reason`, where it is not installed, does not start, or takes more than 20 s.
  bool Start(const std::vector<std::string>& arguments, const std::function<bool()>& answers,
             std::string* reason);
  void Kill();   // kill -9
  void Pause();  // it lives, and answers nothing
  void Continue();

 private:
  pid_t pid_ = 0;
};

}  // namespace heavywater
