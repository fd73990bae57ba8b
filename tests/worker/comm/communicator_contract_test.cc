// What every Communicator does when ranks make different calls (CASES A12):
// FAILED_PRECONDITION naming both on every rank, no data changed, no hang.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "absl/time/clock.h"
#include "tests/worker/comm/rank_group.h"
#include "worker/comm/communicator.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

Stream g_stream;

// One rank's call, with data of its own that must stay as it is.
using Call = std::function<absl::Status(Communicator&)>;

Call SumFloats(int64_t length) {
  return [=](Communicator& comm) {
    std::vector<float> data(length, 2.5f);
    const absl::Status status = comm.AllReduceSum(DeviceSpan<float>(data.data(), length), g_stream);
    EXPECT_EQ(data, std::vector<float>(length, 2.5f));
    return status;
  };
}

Call SumIntegers(int64_t length) {
  return [=](Communicator& comm) {
    std::vector<int64_t> data(length, 7);
    const absl::Status status =
        comm.AllReduceSum(DeviceSpan<int64_t>(data.data(), length), g_stream);
    EXPECT_EQ(data, std::vector<int64_t>(length, 7));
    return status;
  };
}

Call Gather(int64_t length) {
  return [=](Communicator& comm) {
    std::vector<float> in(length, 1), out(length * comm.size(), -1);
    const absl::Status status = comm.AllGather(DeviceSpan<float>(in.data(), length),
                                               DeviceSpan<float>(out.data(), out.size()), g_stream);
    EXPECT_EQ(out, std::vector<float>(out.size(), -1));
    return status;
  };
}

Call Broadcast(int root, int64_t bytes) {
  return [=](Communicator& comm) {
    const std::vector<std::byte> before(bytes, std::byte{9});
    std::vector<std::byte> data = before;
    const absl::Status status = comm.Broadcast(data, root, absl::Seconds(30));
    EXPECT_EQ(data, before);
    return status;
  };
}

Call Barrier() {
  return [](Communicator& comm) { return comm.Barrier(); };
}

class ContractTest : public ::testing::TestWithParam<GroupParam> {
 protected:
  int size() const { return GetParam().size; }

  // Rank `odd` calls `one`, the rest `other`, for every odd rank, with and
  // without the odd rank coming late; every rank's error names both texts.
  void ExpectRefused(const Call& one, const Call& other, const std::string& text_of_one,
                     const std::string& text_of_other) {
    for (int odd = 0; odd < size(); ++odd) {
      for (const bool late : {false, true}) {
        RankGroup group(GetParam());
        const absl::Time start = absl::Now();
        const auto statuses = group.Run([&](int rank, Communicator& comm) {
          if (rank == odd && late) absl::SleepFor(absl::Milliseconds(20));
          return (rank == odd ? one : other)(comm);
        });
        EXPECT_LT(absl::Now() - start, absl::Seconds(10));
        for (const absl::Status& status : statuses) {
          EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
          EXPECT_THAT(std::string(status.message()), HasSubstr(text_of_one));
          EXPECT_THAT(std::string(status.message()), HasSubstr(text_of_other));
        }
      }
    }
  }
};

TEST_P(ContractTest, RefusesUnequalSmallLengths) {
  ExpectRefused(SumFloats(7), SumFloats(5), "AllReduceSum of 7 float32",
                "AllReduceSum of 5 float32");
}

TEST_P(ContractTest, RefusesAScoreReduceThatIsOneTokenLonger) {
  ExpectRefused(SumIntegers(409'600), SumIntegers(409'598), "AllReduceSum of 409600 int64",
                "AllReduceSum of 409598 int64");
}

TEST_P(ContractTest, RefusesAShortCallAgainstALongOne) {
  ExpectRefused(SumFloats(0), SumFloats(1'000'000), "of 0 float32", "of 1000000 float32");
}

TEST_P(ContractTest, RefusesUnequalTypesOfEqualBytes) {
  ExpectRefused(SumFloats(20'000), SumIntegers(10'000), "20000 float32", "10000 int64");
  ExpectRefused(SumFloats(10), SumIntegers(10), "10 float32", "10 int64");
}

TEST_P(ContractTest, RefusesDifferentOperations) {
  ExpectRefused(Barrier(), SumFloats(100), "Barrier", "AllReduceSum of 100 float32");
  ExpectRefused(Broadcast(0, 1'000'000), SumFloats(500'000), "Broadcast from rank 0",
                "AllReduceSum of 500000 float32");
  ExpectRefused(Gather(50'000), SumFloats(50'000), "AllGather of 50000 float32",
                "AllReduceSum of 50000 float32");
}

TEST_P(ContractTest, RefusesDifferentRoots) {
  ExpectRefused(Broadcast(0, 100), Broadcast(1, 100), "Broadcast from rank 0",
                "Broadcast from rank 1");
}

TEST_P(ContractTest, RefusesUnequalGathers) {
  ExpectRefused(Gather(100'000), Gather(99'999), "100000 float32", "99999 float32");
}

TEST_P(ContractTest, ReturnsTheSameErrorFromEveryLaterCall) {
  RankGroup group(GetParam());
  std::vector<absl::Status> first(size());
  group.Run([&](int rank, Communicator& comm) {
    return first[rank] = (rank == 0 ? SumFloats(1) : SumFloats(2))(comm);
  });
  for (const Call& later : {SumFloats(3), SumIntegers(3), Gather(3), Broadcast(0, 3), Barrier()}) {
    const auto statuses = group.Run([&](int, Communicator& comm) { return later(comm); });
    EXPECT_EQ(statuses, first);
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, ContractTest,
    ::testing::Values(GroupParam{CommKind::kLocal, 2}, GroupParam{CommKind::kLocal, 3},
                      GroupParam{CommKind::kLocal, 4}, GroupParam{CommKind::kGloo, 2},
                      GroupParam{CommKind::kGloo, 3}, GroupParam{CommKind::kGloo, 4},
                      GroupParam{CommKind::kNccl, 2}, GroupParam{CommKind::kNccl, 3},
                      GroupParam{CommKind::kNccl, 4}, GroupParam{CommKind::kStaged, 3}),
    [](const auto& info) { return GroupParamName(info.param); });

}  // namespace
}  // namespace heavywater
