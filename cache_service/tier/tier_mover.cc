#include "cache_service/tier/tier_mover.h"

namespace heavywater {

TierMover::TierMover(OrderedPageStore& store, absl::Duration idle)
    : store_(store), idle_(idle), thread_([this] { Run(); }) {}

TierMover::~TierMover() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    stopped_.SignalAll();
  }
  thread_.join();
}

void TierMover::Run() {
  while (true) {
    const bool worked = store_.Turn();
    MutexLock lock(&mutex_);
    if (!worked && !stopping_) stopped_.WaitWithTimeout(&mutex_, idle_);
    if (stopping_) return;
  }
}

}  // namespace heavywater
