// Threads of one CPU backend: a parallel loop, nothing else. Kept apart from
// other libraries' pools so that `num_threads` is a bound.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"
#include "cache_service/base/mutex.h"

namespace heavywater {

class ThreadPool {
 public:
  // The caller of Run() is one of the `num_threads`.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Calls body(task, thread) once for each task in [0, num_tasks) and returns
  // when all are done. Tasks are claimed in ascending order; `thread` is in
  // [0, num_threads()) and never in two calls at once. One Run() at a time.
  using Body = absl::FunctionRef<void(int64_t task, int thread)>;
  void Run(int64_t num_tasks, Body body);

 private:
  struct Loop {
    Body body;
    const int64_t num_tasks;
    std::atomic<int64_t> next{0};
  };
  static void Claim(Loop& loop, int thread);
  void Work(int thread);

  std::vector<std::thread> workers_;
  Mutex mutex_;
  CondVar changed_;
  Loop* loop_ ABSL_GUARDED_BY(mutex_) = nullptr;
  uint64_t loops_started_ ABSL_GUARDED_BY(mutex_) = 0;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;  // workers inside loop_
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace heavywater
