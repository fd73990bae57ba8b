// Work that is done again and again on a thread of its own.
#pragma once

#include <functional>
#include <thread>

#include "absl/time/time.h"
#include "cache_service/base/mutex.h"

namespace heavywater {

// From its making until its end, the first time after one interval.
class Periodic {
 public:
  Periodic(absl::Duration interval, std::function<void()> work);
  ~Periodic();  // waits for work under way
  Periodic(const Periodic&) = delete;
  Periodic& operator=(const Periodic&) = delete;

 private:
  void Run();

  const absl::Duration interval_;
  const std::function<void()> work_;
  Mutex mutex_;
  CondVar changed_;
  bool stop_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace heavywater
