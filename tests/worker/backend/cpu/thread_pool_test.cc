#include "worker/backend/cpu/thread_pool.h"

#include <atomic>
#include <vector>

#include "gtest/gtest.h"

namespace heavywater {
namespace {

TEST(ThreadPoolTest, RunsEveryTaskOnceInEveryLoop) {
  for (const int num_threads : {1, 2, 5}) {
    ThreadPool pool(num_threads);
    for (int64_t num_tasks : {0, 1, 2, 100}) {
      for (int repeat = 0; repeat < 50; ++repeat) {
        std::vector<std::atomic<int>> calls(num_tasks);
        pool.Run(num_tasks, [&](int64_t task, int thread) { ++calls[task]; });
        for (const auto& count : calls) ASSERT_EQ(count, 1);
      }
    }
  }
}

TEST(ThreadPoolTest, NeverGivesOneThreadNumberToTwoTasksAtOnce) {
  ThreadPool pool(3);
  std::vector<std::atomic<int>> inside(3);
  std::atomic<int> clashes = 0;
  pool.Run(1000, [&](int64_t task, int thread) {
    if (inside[thread]++ != 0) ++clashes;
    --inside[thread];
  });
  EXPECT_EQ(clashes, 0);
}

TEST(ThreadPoolTest, WorkersTakeTasksWhileTheCallerIsBusy) {
  ThreadPool pool(2);
  std::atomic<int> finished = 0;
  pool.Run(2, [&](int64_t task, int thread) {
    ++finished;
    // Neither ends before both have begun: only two threads can do that.
    while (finished < 2) std::this_thread::yield();
  });
  EXPECT_EQ(finished, 2);
}

}  // namespace
}  // namespace heavywater
