#include "cache_service/security/periodic.h"

#include <utility>

#include "absl/time/clock.h"

namespace heavywater {

Periodic::Periodic(absl::Duration interval, std::function<void()> work)
    : interval_(interval), work_(std::move(work)), thread_([this] { Run(); }) {}

Periodic::~Periodic() {
  {
    MutexLock lock(&mutex_);
    stop_ = true;
    changed_.SignalAll();
  }
  thread_.join();
}

void Periodic::Run() {
  while (true) {
    const absl::Time next = absl::Now() + interval_;
    {
      MutexLock lock(&mutex_);
      while (!stop_ && absl::Now() < next) changed_.WaitWithTimeout(&mutex_, next - absl::Now());
      if (stop_) return;
    }
    work_();
  }
}

}  // namespace heavywater
