// What every Communicator does when a rank is late, aborts or goes away.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "tests/worker/comm/rank_group.h"
#include "worker/comm/communicator.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

class FailureTest : public ::testing::TestWithParam<GroupParam> {
 protected:
  int size() const { return GetParam().size; }
};

absl::Status SumOnes(Communicator& comm, int64_t length) {
  std::vector<float> data(length, 1.0f);
  Stream stream;
  const absl::Status status = comm.AllReduceSum(DeviceSpan<float>(data.data(), length), stream);
  if (status.ok()) return comm.Settle(stream);
  EXPECT_EQ(data, std::vector<float>(length, 1.0f));
  return status;
}

TEST_P(FailureTest, NamesTheRankThatDidNotComeInTime) {
  RankGroup group(GetParam(), /*timeout=*/absl::Seconds(1));
  const int late = size() - 1;
  const absl::Time start = absl::Now();
  const auto statuses = group.Run([&](int rank, Communicator& comm) {
    if (rank == late) {
      absl::SleepFor(absl::Milliseconds(2500));
      const absl::Status status = SumOnes(comm, 10);
      EXPECT_FALSE(status.ok());
      return status;
    }
    const absl::Status status = SumOnes(comm, 10);
    EXPECT_LT(absl::Now() - start, absl::Seconds(5));
    return status;
  });
  // One rank's time-out breaks the group; another may see that first.
  int timed_out = 0;
  for (int rank = 0; rank < late; ++rank) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(statuses[rank]) || absl::IsUnavailable(statuses[rank]))
        << statuses[rank];
    if (!absl::IsDeadlineExceeded(statuses[rank])) continue;
    ++timed_out;
    EXPECT_THAT(std::string(statuses[rank].message()), HasSubstr(std::to_string(late)));
  }
  EXPECT_GE(timed_out, 1);
}

TEST_P(FailureTest, ABroadcastHasATimeoutOfItsOwn) {
  RankGroup group(GetParam(), /*timeout=*/absl::Seconds(60));
  const absl::Time start = absl::Now();
  std::vector<std::byte> data(5, std::byte{1});
  const absl::Status status = group.rank(1).Broadcast(data, 0, absl::Milliseconds(200));
  EXPECT_TRUE(absl::IsDeadlineExceeded(status)) << status;
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  EXPECT_EQ(data, std::vector<std::byte>(5, std::byte{1}));
}

TEST_P(FailureTest, AFollowerWaitsForTheNextStepLongerThanTheGroupsTimeout) {
  RankGroup group(GetParam(), /*timeout=*/absl::Seconds(1));
  const auto statuses = group.Run([&](int rank, Communicator& comm) {
    if (rank == 0) absl::SleepFor(absl::Milliseconds(1800));  // nothing to do for a while
    std::vector<std::byte> step(rank == 0 ? 10 : 0, std::byte{7});
    const absl::Status status = comm.Broadcast(step, 0, absl::Minutes(2));
    EXPECT_EQ(step, std::vector<std::byte>(10, std::byte{7}));
    return status.ok() ? SumOnes(comm, 1000) : status;
  });
  EXPECT_THAT(statuses, ::testing::Each(absl::OkStatus()));
}

TEST_P(FailureTest, AbortEndsACallInFlightAndThePeersCalls) {
  for (const int64_t length : {10, 1'000'000}) {
    RankGroup group(GetParam(), /*timeout=*/absl::Seconds(60));
    const absl::Status reason = absl::CancelledError("epoch 3 is over");
    std::thread aborter([&] {
      absl::SleepFor(absl::Milliseconds(100));
      group.rank(0).Abort(reason);
    });
    const absl::Time start = absl::Now();
    const auto statuses = group.Run([&](int rank, Communicator& comm) {
      // The last rank is alive but never comes.
      return rank == size() - 1 ? absl::OkStatus() : SumOnes(comm, length);
    });
    aborter.join();
    EXPECT_LT(absl::Now() - start, absl::Seconds(2));
    EXPECT_EQ(statuses[0], reason);
    for (int rank = 1; rank < size(); ++rank) {
      const absl::Status status = SumOnes(group.rank(rank), length);
      EXPECT_TRUE(absl::IsUnavailable(status)) << "rank " << rank << ": " << status;
    }
    EXPECT_EQ(group.rank(0).Barrier(), reason);
  }
}

TEST_P(FailureTest, AbortBeforeACallMakesItReturnTheReason) {
  RankGroup group(GetParam());
  const absl::Status reason = absl::AbortedError("lease lost");
  group.rank(1).Abort(reason);
  group.rank(1).Abort(absl::InternalError("a later reason does not replace the first"));
  EXPECT_EQ(SumOnes(group.rank(1), 5), reason);
}

TEST_P(FailureTest, ARankThatLeavesIsNamedByTheOthersNextCall) {
  RankGroup group(GetParam());
  ASSERT_THAT(group.Run([](int, Communicator& comm) { return comm.Barrier(); }),
              ::testing::Each(absl::OkStatus()));
  const int gone = size() - 1;
  const absl::Time start = absl::Now();
  group.Destroy(gone);  // waits for the others, but not for long
  EXPECT_LT(absl::Now() - start, absl::Seconds(4));
  for (int rank = 0; rank < gone; ++rank) {
    const absl::Status status = SumOnes(group.rank(rank), 10);
    EXPECT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("rank"));
  }
}

TEST_P(FailureTest, LeavingInTheMiddleOfThePeersCallEndsIt) {
  RankGroup group(GetParam());
  const absl::Time start = absl::Now();
  const auto statuses = group.Run([&](int rank, Communicator& comm) {
    if (rank > 0) {
      std::vector<std::byte> step;
      return comm.Broadcast(step, 0, absl::Minutes(5));
    }
    absl::SleepFor(absl::Milliseconds(100));
    group.Destroy(0);
    return absl::OkStatus();
  });
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  for (int rank = 1; rank < size(); ++rank) {
    EXPECT_TRUE(absl::IsUnavailable(statuses[rank])) << statuses[rank];
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, FailureTest,
    ::testing::Values(GroupParam{CommKind::kLocal, 2}, GroupParam{CommKind::kLocal, 3},
                      GroupParam{CommKind::kGloo, 2}, GroupParam{CommKind::kGloo, 3},
                      GroupParam{CommKind::kGloo, 4}, GroupParam{CommKind::kNccl, 2},
                      GroupParam{CommKind::kNccl, 3}, GroupParam{CommKind::kNccl, 4},
                      GroupParam{CommKind::kStaged, 3}),
    [](const auto& info) { return GroupParamName(info.param); });

}  // namespace
}  // namespace heavywater
