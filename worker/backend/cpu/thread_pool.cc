#include "worker/backend/cpu/thread_pool.h"

#include "cache_service/base/check.h"

namespace heavywater {

ThreadPool::ThreadPool(int num_threads) {
  HW_CHECK(num_threads >= 1);
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread] { Work(thread); });
  }
}

ThreadPool::~ThreadPool() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
  }
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::Claim(Loop& loop, int thread) {
  while (true) {
    const int64_t task = loop.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= loop.num_tasks) return;
    loop.body(task, thread);
  }
}

void ThreadPool::Run(int64_t num_tasks, Body body) {
  Loop loop{body, num_tasks};
  if (workers_.empty() || num_tasks <= 1) return Claim(loop, 0);
  {
    MutexLock lock(&mutex_);
    loop_ = &loop;
    ++loops_started_;
    changed_.SignalAll();
  }
  Claim(loop, 0);
  // A worker that has not woken up by now finds no loop: nobody waits for it.
  MutexLock lock(&mutex_);
  loop_ = nullptr;
  while (running_ > 0) changed_.Wait(&mutex_);
}

void ThreadPool::Work(int thread) {
  uint64_t loops_seen = 0;
  MutexLock lock(&mutex_);
  while (!stopping_) {
    if (loop_ == nullptr || loops_seen == loops_started_) {
      changed_.Wait(&mutex_);
      continue;
    }
    loops_seen = loops_started_;
    Loop* loop = loop_;
    ++running_;
    mutex_.Unlock();
    Claim(*loop, thread);
    mutex_.Lock();
    if (--running_ == 0) changed_.SignalAll();
  }
}

}  // namespace heavywater
