#include "cache_service/base/executor.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

absl::Status QueueFull(size_t max_queued) {
  return absl::ResourceExhaustedError(
      absl::StrCat("background queue holds its bound of ", max_queued, " tasks"));
}

}  // namespace

ThreadExecutor::ThreadExecutor(size_t max_queued, int num_threads) : max_queued_(max_queued) {
  for (int i = 0; i < num_threads; ++i) threads_.emplace_back([this] { Run(); });
}

ThreadExecutor::~ThreadExecutor() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Status ThreadExecutor::Schedule(std::function<void()> task) {
  MutexLock lock(&mutex_);
  if (queue_.size() >= max_queued_) return QueueFull(max_queued_);
  queue_.push_back(std::move(task));
  changed_.Signal();
  return absl::OkStatus();
}

void ThreadExecutor::Run() {
  while (true) {
    std::function<void()> task;
    {
      MutexLock lock(&mutex_);
      while (queue_.empty() && !stopping_) changed_.Wait(&mutex_);
      if (queue_.empty()) return;
      task = std::move(queue_.front());
      queue_.pop_front();
    }
    task();
  }
}

absl::Status ManualExecutor::Schedule(std::function<void()> task) {
  MutexLock lock(&mutex_);
  if (queue_.size() >= max_queued_) return QueueFull(max_queued_);
  queue_.push_back(std::move(task));
  return absl::OkStatus();
}

bool ManualExecutor::RunOne() {
  std::function<void()> task;
  {
    MutexLock lock(&mutex_);
    if (queue_.empty()) return false;
    task = std::move(queue_.front());
    queue_.pop_front();
  }
  task();
  return true;
}

}  // namespace heavywater
