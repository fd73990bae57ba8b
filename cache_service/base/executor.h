// Where background work runs: a thread in servers, by hand in tests.
#pragma once

#include <deque>
#include <functional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/base/mutex.h"

namespace heavywater {

// Thread safe. Tasks run in the order in which they were scheduled.
class Executor {
 public:
  virtual ~Executor() = default;
  // RESOURCE_EXHAUSTED when the queue is at its bound; the task is not kept.
  virtual absl::Status Schedule(std::function<void()> task) = 0;
};

// A bounded queue. The destructor runs what is queued, then joins. With more than one thread a
// task may end before one that was scheduled earlier.
class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(size_t max_queued, int num_threads = 1);
  ~ThreadExecutor() override;
  absl::Status Schedule(std::function<void()> task) override;

 private:
  void Run();

  const size_t max_queued_;
  Mutex mutex_;
  CondVar changed_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

// Runs nothing until asked: tests decide when background work happens.
class ManualExecutor final : public Executor {
 public:
  explicit ManualExecutor(size_t max_queued) : max_queued_(max_queued) {}
  absl::Status Schedule(std::function<void()> task) override;
  // Runs the oldest task; false when there is none.
  bool RunOne();
  void RunAll() {
    while (RunOne()) {
    }
  }

 private:
  const size_t max_queued_;
  Mutex mutex_;
  std::deque<std::function<void()>> queue_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
