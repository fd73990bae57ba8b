#include "cache_service/runtime/shutdown_signal.h"

#include <pthread.h>

namespace heavywater {

ShutdownSignal::ShutdownSignal() {
  sigemptyset(&signals_);
  sigaddset(&signals_, SIGTERM);
  sigaddset(&signals_, SIGINT);
  pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
}

bool ShutdownSignal::WaitFor(absl::Duration timeout) {
  if (received_) return true;
  const timespec wait = absl::ToTimespec(timeout);
  received_ = sigtimedwait(&signals_, nullptr, &wait) > 0;
  return received_;
}

}  // namespace heavywater
