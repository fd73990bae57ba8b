// Streams for the fake NCCL: what each thread has queued and has not waited for.
#pragma once

#include <memory>

#include "cache_service/base/mutex.h"

namespace heavywater::fake_nccl {

// One piece of queued work. Thread safe.
class StreamTicket {
 public:
  void Finish() {
    MutexLock lock(&mutex_);
    done_ = true;
    finished_.SignalAll();
  }
  void Wait() {
    MutexLock lock(&mutex_);
    while (!done_) finished_.Wait(&mutex_);
  }

 private:
  Mutex mutex_;
  CondVar finished_;
  bool done_ ABSL_GUARDED_BY(mutex_) = false;
};

// SynchronizeStream() on this thread waits for it.
std::shared_ptr<StreamTicket> NewTicketOfThisThread();

// The device that this thread last chose with UseDevice(), -1: none.
int DeviceOfThisThread();

}  // namespace heavywater::fake_nccl
