// What is the NCCL communicator's own: agreement that waits for nobody, errors that
// come later, groups that form again. The fake's ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "tests/worker/comm/fake_nccl.h"
#include "tests/worker/comm/fake_stream.h"
#include "tests/worker/comm/rank_group.h"
#include "worker/comm/nccl/nccl_options.h"

namespace heavywater {
namespace {

using ::testing::AnyOf;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr absl::Duration kLong = absl::Minutes(5);

std::string MessageOf(const absl::Status& status) { return std::string(status.message()); }

absl::Status Queue(Communicator& comm, std::vector<float>& data) {
  Stream stream;
  return comm.AllReduceSum(DeviceSpan<float>(data.data(), static_cast<int64_t>(data.size())),
                           stream);
}

absl::Status Settle(Communicator& comm) {
  Stream stream;
  return comm.Settle(stream);
}

absl::Status SumOnes(Communicator& comm, int64_t length) {
  std::vector<float> data(length, 1.0f);
  const absl::Status status = Queue(comm, data);
  return status.ok() ? Settle(comm) : status;
}

class NcclCommunicatorTest : public ::testing::Test {
 protected:
  NcclCommunicatorTest() { fake_nccl::Reset(); }
  ~NcclCommunicatorTest() override { EXPECT_EQ(fake_nccl::NumAlive(), 0); }

  static std::unique_ptr<RankGroup> Group(int size, absl::Duration timeout = kLong) {
    return std::make_unique<RankGroup>(GroupParam{CommKind::kNccl, size}, timeout);
  }

  // What each of `size` ranks gets that try to form a group; `prepare(rank)` runs on
  // its thread first.
  std::vector<absl::Status> TryToForm(int size, absl::Duration timeout,
                                      const std::function<void(int, NcclOptions&)>& prepare) {
    std::vector<absl::Status> statuses(size);
    InProcessRendezvous store;
    RunOnThreads(size, [&](int rank) {
      NcclOptions options{.rank = rank, .size = size, .timeout = timeout, .key_prefix = "f/"};
      prepare(rank, options);
      statuses[rank] = CreateNcclCommunicator(options, store).status();
    });
    return statuses;
  }
};

TEST_F(NcclCommunicatorTest, AKnownCallDoesNotWaitForThePeersHosts) {
  auto group = Group(2);
  const auto statuses = group->Run([](int rank, Communicator& comm) {
    absl::Status status = SumOnes(comm, 100);
    std::vector<float> data(100, 1.0f);
    if (rank == 1) absl::SleepFor(absl::Milliseconds(300));
    const absl::Time start = absl::Now();
    if (status.ok()) status = Queue(comm, data);
    EXPECT_LT(absl::Now() - start, absl::Milliseconds(200));
    if (status.ok()) status = Settle(comm);
    EXPECT_EQ(data, std::vector<float>(100, 2.0f));
    return status;
  });
  EXPECT_THAT(statuses, Each(absl::OkStatus()));
}

TEST_F(NcclCommunicatorTest, KnownCallsThatDifferAreNamedWhenTheyAreSettled) {
  for (const int odd : {0, 2}) {
    auto group = Group(3);
    const auto statuses = group->Run([&](int rank, Communicator& comm) {
      absl::Status status = SumOnes(comm, 700);
      if (status.ok()) status = SumOnes(comm, 500);
      std::vector<float> data(rank == odd ? 700 : 500, 1.0f);
      if (status.ok()) status = Queue(comm, data);
      EXPECT_TRUE(status.ok()) << status;
      const absl::Status settled = Settle(comm);
      EXPECT_EQ(comm.Barrier(), settled);
      return settled;
    });
    for (const absl::Status& status : statuses) {
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_THAT(MessageOf(status), HasSubstr("AllReduceSum of 700 float32"));
      EXPECT_THAT(MessageOf(status), HasSubstr("AllReduceSum of 500 float32"));
    }
  }
}

TEST_F(NcclCommunicatorTest, ARankThatMadeOneCallMoreIsFoundAtOnce) {
  auto group = Group(2);
  const absl::Time start = absl::Now();
  const auto statuses = group->Run([](int rank, Communicator& comm) {
    absl::Status status = SumOnes(comm, 5);
    std::vector<float> one(5, 1.0f), two(5, 1.0f);
    if (status.ok()) status = Queue(comm, one);
    if (status.ok() && rank == 0) status = Queue(comm, two);
    return status.ok() ? Settle(comm) : status;
  });
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(MessageOf(status), HasSubstr("2, 1"));
  }
}

TEST_F(NcclCommunicatorTest, ANewCallAgainstAKnownOneIsNamedAndNobodyHangs) {
  auto group = Group(2);
  const absl::Time start = absl::Now();
  const auto statuses = group->Run([](int rank, Communicator& comm) {
    absl::Status status = SumOnes(comm, 5);
    std::vector<float> data(rank == 0 ? 9 : 5, 1.0f);
    if (status.ok()) status = Queue(comm, data);
    return status.ok() ? Settle(comm) : status;
  });
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(MessageOf(status), HasSubstr("rank 0: AllReduceSum of 9 float32"));
    EXPECT_THAT(MessageOf(status), HasSubstr("rank 1: Settle"));
  }
}

TEST_F(NcclCommunicatorTest, CallsAreComparedNowAndThenEvenIfNobodySettles) {
  auto group = Group(2);
  const auto statuses = group->Run([](int rank, Communicator& comm) {
    absl::Status status = SumOnes(comm, 4);
    if (status.ok()) status = SumOnes(comm, 8);
    std::vector<float> data(8, 0.0f);
    const int64_t length = rank == 0 ? 4 : 8;
    Stream stream;
    for (int call = 0; status.ok() && call < 3000; ++call) {
      status = comm.AllReduceSum(DeviceSpan<float>(data.data(), length), stream);
    }
    Settle(comm).IgnoreError();  // `data` is free to go
    return status;
  });
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(MessageOf(status), HasSubstr("AllReduceSum of 4 float32"));
  }
  EXPECT_LT(fake_nccl::NumQueued(), 2 * 1100);
}

TEST_F(NcclCommunicatorTest, AnAsynchronousErrorEndsTheWaitAndIsTold) {
  auto group = Group(3);
  const absl::Time start = absl::Now();
  const auto statuses = group->Run([](int rank, Communicator& comm) {
    absl::Status status = SumOnes(comm, 10);
    if (status.ok()) status = comm.Barrier();
    if (rank == 2) fake_nccl::Hang(2);
    if (rank == 1) fake_nccl::SetAsyncError(1, ncclRemoteError);
    return status.ok() ? SumOnes(comm, 10) : status;
  });
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  EXPECT_TRUE(absl::IsUnavailable(statuses[1])) << statuses[1];
  EXPECT_THAT(MessageOf(statuses[1]), HasSubstr("remote process exited"));
  EXPECT_THAT(MessageOf(statuses[1]), HasSubstr("the fake's last words"));
  for (const int peer : {0, 2}) {
    EXPECT_TRUE(absl::IsUnavailable(statuses[peer])) << statuses[peer];
    EXPECT_THAT(MessageOf(statuses[peer]), HasSubstr("rank"));
  }
  // The first error is every later call's.
  EXPECT_EQ(group->Run([](int, Communicator& comm) { return SumOnes(comm, 10); }), statuses);
}

TEST_F(NcclCommunicatorTest, APeerThatHangsOnItsDeviceIsADeadline) {
  auto group = Group(2, absl::Seconds(1));
  const absl::Time start = absl::Now();
  const auto statuses = group->Run([](int rank, Communicator& comm) {
    absl::Status status = SumOnes(comm, 10);
    if (status.ok()) status = comm.Barrier();
    if (rank == 0) fake_nccl::Hang(1);
    return status.ok() ? SumOnes(comm, 10) : status;
  });
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  // One rank's time-out breaks the group; the other may see that first.
  for (const absl::Status& status : statuses) {
    EXPECT_THAT(status.code(),
                AnyOf(absl::StatusCode::kDeadlineExceeded, absl::StatusCode::kUnavailable));
  }
}

TEST_F(NcclCommunicatorTest, AbortEndsAWaitForTheDevice) {
  auto group = Group(2);
  const absl::Status reason = absl::AbortedError("epoch 3 is over");
  ASSERT_THAT(group->Run([](int, Communicator& comm) { return SumOnes(comm, 10); }),
              Each(absl::OkStatus()));
  fake_nccl::Hang(1);
  std::thread aborter([&] {
    absl::SleepFor(absl::Milliseconds(200));
    group->rank(0).Abort(reason);
  });
  const absl::Time start = absl::Now();
  const auto statuses = group->Run([](int, Communicator& comm) { return SumOnes(comm, 10); });
  aborter.join();
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_EQ(statuses[0], reason);
  EXPECT_TRUE(absl::IsUnavailable(statuses[1])) << statuses[1];
}

TEST_F(NcclCommunicatorTest, AnOrderlyEndDestroysAndAnErrorAborts) {
  Group(3).reset();
  EXPECT_EQ(fake_nccl::NumDestroyed(), 3);
  EXPECT_EQ(fake_nccl::NumAborted(), 0);
  auto group = Group(2);
  group->rank(1).Abort(absl::CancelledError("enough"));
  group.reset();
  EXPECT_EQ(fake_nccl::NumDestroyed(), 3);
  EXPECT_EQ(fake_nccl::NumAborted(), 2);
}

TEST_F(NcclCommunicatorTest, AGroupFormsAgainUnderAnotherPrefixOfTheSameStore) {
  InProcessRendezvous store;
  for (const char* prefix : {"g/1/", "g/2/"}) {
    std::vector<std::unique_ptr<Communicator>> ranks(2);
    RunOnThreads(2, [&](int rank) {
      auto comm = CreateNcclCommunicator({.rank = rank, .size = 2, .key_prefix = prefix}, store);
      ASSERT_TRUE(comm.ok()) << comm.status();
      EXPECT_TRUE(SumOnes(**comm, 10).ok());
      ranks[rank] = *std::move(comm);
    });
    ranks[0]->Abort(absl::AbortedError("epoch over"));
    EXPECT_TRUE(absl::IsUnavailable(SumOnes(*ranks[1], 10)));
  }
}

TEST_F(NcclCommunicatorTest, ARankThatNeverJoinsIsADeadlineOfForming) {
  fake_nccl::HoldInit(1);
  const absl::Time start = absl::Now();
  const auto statuses = TryToForm(2, absl::Seconds(1), [](int, NcclOptions&) {});
  EXPECT_LT(absl::Now() - start, absl::Seconds(6));
  int timed_out = 0;
  for (const absl::Status& status : statuses) {
    EXPECT_FALSE(status.ok());
    if (!absl::IsDeadlineExceeded(status)) continue;
    ++timed_out;
    EXPECT_THAT(MessageOf(status), HasSubstr("ncclCommInitRankConfig did not end within 1s"));
  }
  EXPECT_GE(timed_out, 1);
}

TEST_F(NcclCommunicatorTest, ARankThatGivesUpEndsTheOthersWaitToForm) {
  fake_nccl::HoldInit(1);
  const absl::Time start = absl::Now();
  const auto statuses = TryToForm(3, kLong, [](int rank, NcclOptions& options) {
    if (rank == 1) options.timeout = absl::Milliseconds(500);
  });
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  EXPECT_TRUE(absl::IsDeadlineExceeded(statuses[1])) << statuses[1];
  for (const int peer : {0, 2}) {
    EXPECT_TRUE(absl::IsUnavailable(statuses[peer])) << statuses[peer];
  }
}

TEST_F(NcclCommunicatorTest, AnotherVersionOfNcclIsRefusedNamingBoth) {
  const auto statuses = TryToForm(2, kLong, [](int rank, NcclOptions&) {
    fake_nccl::SetVersionOfThisThread(rank == 1 ? 21805 : 22809);
  });
  EXPECT_TRUE(absl::IsFailedPrecondition(statuses[1])) << statuses[1];
  EXPECT_THAT(MessageOf(statuses[1]), HasSubstr("NCCL is version 21805 here and 22809 on rank 0"));
  EXPECT_FALSE(statuses[0].ok());
}

TEST_F(NcclCommunicatorTest, RankZeroThatCanMakeNoIdSaysSoToTheOthers) {
  fake_nccl::SetUniqueIdResult(ncclInternalError);
  const absl::Time start = absl::Now();
  const auto statuses = TryToForm(2, kLong, [](int, NcclOptions&) {});
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  EXPECT_THAT(MessageOf(statuses[0]), HasSubstr("ncclGetUniqueId(&id): internal error"));
  EXPECT_THAT(MessageOf(statuses[1]),
              HasSubstr("rank 0 could not make an NCCL id: ncclGetUniqueId"));
}

TEST_F(NcclCommunicatorTest, CallsUseItsDeviceWhateverTheThreadsIs) {
  auto group = Group(3);  // rank i on device i
  const auto statuses = group->Run([](int rank, Communicator& comm) {
    EXPECT_EQ(fake_nccl::DeviceOfThisThread(), -1);
    std::vector<float> data(5, 1.0f);
    const absl::Status status = Queue(comm, data);
    EXPECT_EQ(fake_nccl::DeviceOfThisThread(), rank);
    return status.ok() ? Settle(comm) : status;
  });
  EXPECT_THAT(statuses, Each(absl::OkStatus()));
}

TEST_F(NcclCommunicatorTest, UsesTheDeviceItIsGivenAndRefusesOneThatIsNotThere) {
  InProcessRendezvous store;
  auto comm = CreateNcclCommunicator({.device = 5}, store);
  ASSERT_TRUE(comm.ok()) << comm.status();
  EXPECT_EQ(fake_nccl::DeviceOfThisThread(), 5);
  EXPECT_TRUE(absl::IsInvalidArgument(CreateNcclCommunicator({.device = 8}, store).status()));
}

TEST_F(NcclCommunicatorTest, NcclUsesTheConfiguredInterfaceUnlessItsOwnVariableIsSet) {
  unsetenv("NCCL_SOCKET_IFNAME");
  for (const char* want : {"lo", "eth7"}) {
    InProcessRendezvous store;
    ASSERT_TRUE(CreateNcclCommunicator({.interface = "lo"}, store).ok());
    EXPECT_STREQ(getenv("NCCL_SOCKET_IFNAME"), want);
    setenv("NCCL_SOCKET_IFNAME", "eth7", 1);
  }
  unsetenv("NCCL_SOCKET_IFNAME");
}

}  // namespace
}  // namespace heavywater
