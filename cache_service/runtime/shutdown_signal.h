// SIGTERM and SIGINT as something that main() waits for.
#pragma once

#include <csignal>

#include "absl/time/time.h"

namespace heavywater {

// Made first thing in main(), before any thread: the signals are blocked for all
// threads and taken here. SIGPIPE is ignored.
class ShutdownSignal {
 public:
  ShutdownSignal();

  // True when one has come, within `timeout` or before.
  bool WaitFor(absl::Duration timeout);

 private:
  sigset_t signals_;
  bool received_ = false;
};

}  // namespace heavywater
