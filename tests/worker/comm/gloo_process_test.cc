// Gloo between real processes, some of which are killed or stopped.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <iostream>
#include <vector>

#include "absl/time/clock.h"
#include "cache_service/base/check.h"
#include "tests/worker/comm/shared_memory_rendezvous.h"
#include "worker/comm/communicator.h"

namespace heavywater {
namespace {

// Exit status of a rank whose expectation failed; it has printed why.
constexpr int kFailed = 1;

// A number that all processes see.
class SharedCounter {
 public:
  SharedCounter()
      : value_(static_cast<std::atomic<int>*>(mmap(nullptr, sizeof(std::atomic<int>),
                                                   PROT_READ | PROT_WRITE,
                                                   MAP_SHARED | MAP_ANONYMOUS, -1, 0))) {
    HW_CHECK(value_ != MAP_FAILED);
  }
  ~SharedCounter() { munmap(value_, sizeof(*value_)); }
  void Increment() { value_->fetch_add(1); }
  void WaitFor(int want) const {
    while (value_->load() < want) absl::SleepFor(absl::Milliseconds(1));
  }

 private:
  std::atomic<int>* const value_;
};

bool Expect(bool condition, const char* what, const absl::Status& status) {
  if (!condition) std::cerr << "process: wanted " << what << ", got " << status << std::endl;
  return condition;
}

class GlooProcessTest : public ::testing::Test {
 protected:
  using Body = std::function<bool(int rank, Communicator& comm)>;

  // A process per rank; each forms the group, then runs `body`.
  void Start(int size, absl::Duration timeout, const Body& body) {
    for (int rank = 0; rank < size; ++rank) {
      const pid_t pid = fork();
      ASSERT_GE(pid, 0);
      if (pid == 0) _exit(RunChild(rank, size, timeout, body) ? 0 : kFailed);
      pids_.push_back(pid);
    }
  }

  bool RunChild(int rank, int size, absl::Duration timeout, const Body& body) {
    auto comm = CreateGlooCommunicator(
        {.rank = rank, .size = size, .timeout = timeout, .key_prefix = "p"}, store_);
    if (!Expect(comm.ok(), "a group", comm.status())) return false;
    formed_.Increment();
    return body(rank, **comm);
  }

  void WaitUntilFormed() { formed_.WaitFor(static_cast<int>(pids_.size())); }

  // Whether the rank ended by itself with all expectations met.
  bool EndedWell(int rank) {
    int status = 0;
    HW_CHECK(waitpid(pids_[rank], &status, 0) == pids_[rank]);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  void Kill(int rank) {
    kill(pids_[rank], SIGKILL);
    HW_CHECK(waitpid(pids_[rank], nullptr, 0) == pids_[rank]);
  }

  SharedMemoryRendezvous store_;
  SharedCounter formed_;
  std::vector<pid_t> pids_;
};

absl::Status Sum(Communicator& comm, int64_t length) {
  std::vector<float> data(length, 1.0f);
  Stream stream;
  absl::Status status = comm.AllReduceSum(DeviceSpan<float>(data.data(), length), stream);
  const float want = status.ok() ? comm.size() : 1.0f;
  for (const float value : data) HW_CHECK(value == want);
  return status;
}

TEST_F(GlooProcessTest, ProcessesSumAndLeaveTogether) {
  Start(3, absl::Seconds(30), [](int, Communicator& comm) {
    for (const int64_t length : {1, 1000, 100'000}) {
      const absl::Status status = Sum(comm, length);
      if (!Expect(status.ok(), "a sum", status)) return false;
    }
    return true;
  });
  for (int rank = 0; rank < 3; ++rank) EXPECT_TRUE(EndedWell(rank)) << "rank " << rank;
}

TEST_F(GlooProcessTest, AKilledRankIsNoticedAtOnceByRanksInAReduce) {
  Start(3, absl::Minutes(5), [](int rank, Communicator& comm) {
    if (rank == 2) pause();
    const absl::Status status = Sum(comm, 100'000);
    return Expect(absl::IsUnavailable(status), "UNAVAILABLE", status);
  });
  WaitUntilFormed();
  absl::SleepFor(absl::Milliseconds(100));
  const absl::Time start = absl::Now();
  Kill(2);
  EXPECT_TRUE(EndedWell(0));
  EXPECT_TRUE(EndedWell(1));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

TEST_F(GlooProcessTest, AKilledRankIsNoticedByRanksThatWaitForTheNextStep) {
  Start(3, absl::Minutes(5), [](int rank, Communicator& comm) {
    if (rank == 0) {
      // Idle, so it learns only when it has something to say again.
      absl::SleepFor(absl::Seconds(2));
      std::vector<std::byte> step(10);
      const absl::Status status = comm.Broadcast(step, 0, absl::Seconds(5));
      return Expect(absl::IsUnavailable(status), "UNAVAILABLE", status);
    }
    std::vector<std::byte> step;
    const absl::Time start = absl::Now();
    const absl::Status status = comm.Broadcast(step, 0, absl::Minutes(5));
    return Expect(absl::IsUnavailable(status) && absl::Now() - start < absl::Seconds(10),
                  "UNAVAILABLE soon", status);
  });
  WaitUntilFormed();
  absl::SleepFor(absl::Milliseconds(100));
  const absl::Time start = absl::Now();
  Kill(2);
  EXPECT_TRUE(EndedWell(1));
  EXPECT_LT(absl::Now() - start, absl::Milliseconds(1900));
  EXPECT_TRUE(EndedWell(0));
}

TEST_F(GlooProcessTest, RanksKilledInTheMiddleOfManyReducesNeverHangTheOthers) {
  Start(3, absl::Seconds(30), [](int, Communicator& comm) {
    for (;;) {
      for (const int64_t length : {100, 300'000}) {
        const absl::Status status = Sum(comm, length);
        if (!status.ok()) return Expect(absl::IsUnavailable(status), "UNAVAILABLE", status);
      }
    }
  });
  WaitUntilFormed();
  absl::SleepFor(absl::Milliseconds(200));
  const absl::Time start = absl::Now();
  Kill(1);
  EXPECT_TRUE(EndedWell(0));
  EXPECT_TRUE(EndedWell(2));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
}

TEST_F(GlooProcessTest, AStoppedRankIsADeadline) {
  Start(2, absl::Seconds(1), [](int rank, Communicator& comm) {
    if (rank == 1) pause();
    const absl::Status status = Sum(comm, 2'000'000);
    return Expect(absl::IsDeadlineExceeded(status), "DEADLINE_EXCEEDED", status);
  });
  WaitUntilFormed();
  kill(pids_[1], SIGSTOP);
  const absl::Time start = absl::Now();
  EXPECT_TRUE(EndedWell(0));
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  Kill(1);
}

TEST_F(GlooProcessTest, LeavingDoesNotWaitForAKilledRank) {
  Start(2, absl::Minutes(5), [](int rank, Communicator& comm) {
    if (rank == 1) pause();
    absl::SleepFor(absl::Milliseconds(500));
    return true;  // leaves after rank 1 was killed
  });
  WaitUntilFormed();
  Kill(1);
  const absl::Time start = absl::Now();
  EXPECT_TRUE(EndedWell(0));
  EXPECT_LT(absl::Now() - start, absl::Seconds(2));
}

}  // namespace
}  // namespace heavywater
