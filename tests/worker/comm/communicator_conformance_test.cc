// What every Communicator does when all ranks make the same calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "absl/time/clock.h"
#include "tests/worker/comm/rank_group.h"
#include "worker/comm/communicator.h"

namespace heavywater {
namespace {

using ::testing::Each;

constexpr int64_t kLengths[] = {0, 1, 2, 1023, 1024, 1025, 100'000, 1'000'000};
const absl::Status kOk = absl::OkStatus();

template <typename T>
DeviceSpan<T> Span(std::vector<T>& data) {
  return DeviceSpan<T>(data.data(), static_cast<int64_t>(data.size()));
}

std::vector<uint32_t> Bits(const std::vector<float>& data) {
  std::vector<uint32_t> bits(data.size());
  if (!data.empty()) std::memcpy(bits.data(), data.data(), data.size() * sizeof(float));
  return bits;
}

// Magnitudes from 1e-8 to 1e8: sums in another order give other bits.
std::vector<float> WildFloats(int rank, int64_t length) {
  std::mt19937 random(rank * 1000 + 1);
  std::uniform_real_distribution<float> exponent(-8, 8);
  std::vector<float> data(length);
  for (float& value : data) value = std::pow(10.0f, exponent(random)) * (random() % 2 ? 1 : -1);
  return data;
}

std::vector<std::byte> Pattern(int64_t length, int seed) {
  std::vector<std::byte> data(length);
  for (int64_t i = 0; i < length; ++i) data[i] = static_cast<std::byte>((i * 31 + seed) % 251);
  return data;
}

// As a rank uses it: reduces, then waits for the result.
template <typename T>
absl::Status Sum(Communicator& comm, std::vector<T>& data) {
  Stream stream;
  const absl::Status status = comm.AllReduceSum(Span(data), stream);
  return status.ok() ? comm.Settle(stream) : status;
}

class CommunicatorTest : public ::testing::TestWithParam<GroupParam> {
 protected:
  int size() const { return GetParam().size; }
};

TEST_P(CommunicatorTest, KnowsItsRankAndSize) {
  RankGroup group(GetParam());
  for (int rank = 0; rank < size(); ++rank) {
    EXPECT_EQ(group.rank(rank).rank(), rank);
    EXPECT_EQ(group.rank(rank).size(), size());
    EXPECT_EQ(group.rank(rank).Name(), KindName(GetParam().kind));
  }
}

// In host memory also in rank order.
TEST_P(CommunicatorTest, SumsFloatsWithTheSameBitsOnEveryRank) {
  RankGroup group(GetParam());
  for (const int64_t length : kLengths) {
    std::vector<float> want(length), magnitude(length);
    for (int rank = 0; rank < size(); ++rank) {
      const std::vector<float> term = WildFloats(rank, length);
      for (int64_t i = 0; i < length; ++i) {
        want[i] = rank == 0 ? term[i] : want[i] + term[i];
        magnitude[i] += std::abs(term[i]);
      }
    }
    std::vector<std::vector<float>> data(size());
    const auto statuses = group.Run([&](int rank, Communicator& comm) {
      data[rank] = WildFloats(rank, length);
      return Sum(comm, data[rank]);
    });
    EXPECT_THAT(statuses, Each(kOk));
    const bool in_rank_order = GetParam().kind != CommKind::kNccl;
    for (int rank = 0; rank < size(); ++rank) {
      EXPECT_TRUE(Bits(data[rank]) == Bits(in_rank_order ? want : data[0]))
          << "rank " << rank << " length " << length;
    }
    for (int64_t i = 0; i < length; ++i) {
      ASSERT_NEAR(data[0][i], want[i], 1e-6 * magnitude[i]) << "length " << length;
    }
  }
}

TEST_P(CommunicatorTest, SumsIntegersExactly) {
  RankGroup group(GetParam());
  constexpr int64_t kBig = int64_t{1} << 60;  // far outside what a double holds exactly
  for (const int64_t length : kLengths) {
    std::vector<std::vector<int64_t>> data(size());
    const auto statuses = group.Run([&](int rank, Communicator& comm) {
      data[rank].resize(length);
      for (int64_t i = 0; i < length; ++i) data[rank][i] = kBig + i * (rank + 1) + rank;
      return Sum(comm, data[rank]);
    });
    EXPECT_THAT(statuses, Each(kOk));
    const int64_t ranks = size();
    std::vector<int64_t> want(length);
    for (int64_t i = 0; i < length; ++i) {
      want[i] = kBig * ranks + i * (ranks * (ranks + 1) / 2) + ranks * (ranks - 1) / 2;
    }
    for (int rank = 0; rank < size(); ++rank) {
      EXPECT_TRUE(data[rank] == want) << "rank " << rank << " length " << length;
    }
  }
}

TEST_P(CommunicatorTest, GathersInRankOrder) {
  RankGroup group(GetParam());
  for (const int64_t length : {int64_t{0}, int64_t{1}, int64_t{1000}, int64_t{100'000}}) {
    std::vector<float> want;
    for (int rank = 0; rank < size(); ++rank) {
      const std::vector<float> part = WildFloats(rank, length);
      want.insert(want.end(), part.begin(), part.end());
    }
    std::vector<std::vector<float>> out(size());
    const auto statuses = group.Run([&](int rank, Communicator& comm) {
      std::vector<float> in = WildFloats(rank, length);
      out[rank].resize(length * size());
      Stream stream;
      const absl::Status status = comm.AllGather(Span(in), Span(out[rank]), stream);
      return status.ok() ? comm.Settle(stream) : status;
    });
    EXPECT_THAT(statuses, Each(kOk));
    for (int rank = 0; rank < size(); ++rank) {
      EXPECT_TRUE(Bits(out[rank]) == Bits(want)) << "rank " << rank << " length " << length;
    }
  }
}

TEST_P(CommunicatorTest, BroadcastsFromAnyRootAndResizesTheRest) {
  RankGroup group(GetParam());
  for (const int64_t length : {0, 1, 4096, 65'536, 65'537, 3'000'000}) {
    for (int root = 0; root < size(); ++root) {
      std::vector<std::vector<std::byte>> data(size());
      const auto statuses = group.Run([&](int rank, Communicator& comm) {
        data[rank] = rank == root ? Pattern(length, root) : Pattern(10 + rank, 99);
        return comm.Broadcast(data[rank], root, absl::Seconds(30));
      });
      EXPECT_THAT(statuses, Each(kOk));
      for (int rank = 0; rank < size(); ++rank) {
        EXPECT_TRUE(data[rank] == Pattern(length, root)) << "rank " << rank << " length " << length;
      }
    }
  }
}

TEST_P(CommunicatorTest, BroadcastsTheLargestMessage) {
  RankGroup group(GetParam());
  std::vector<std::vector<std::byte>> data(size());
  data[0] = Pattern(kMaxBroadcastBytes, 3);
  const auto statuses = group.Run([&](int rank, Communicator& comm) {
    return comm.Broadcast(data[rank], 0, absl::Seconds(60));
  });
  EXPECT_THAT(statuses, Each(kOk));
  for (int rank = 1; rank < size(); ++rank) EXPECT_TRUE(data[rank] == data[0]);
}

TEST_P(CommunicatorTest, RefusesALargerBroadcastOnEveryRank) {
  RankGroup group(GetParam());
  std::vector<std::vector<std::byte>> data(size(), Pattern(7, 1));
  data[0].resize(kMaxBroadcastBytes + 1);
  const auto statuses = group.Run([&](int rank, Communicator& comm) {
    return comm.Broadcast(data[rank], 0, absl::Seconds(30));
  });
  for (const absl::Status& status : statuses)
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  for (int rank = 1; rank < size(); ++rank) EXPECT_TRUE(data[rank] == Pattern(7, 1));
}

TEST_P(CommunicatorTest, NobodyPassesABarrierBeforeAllHaveCome) {
  RankGroup group(GetParam());
  for (int late = 0; late < size(); ++late) {
    std::vector<absl::Time> left(size());
    absl::Time came;
    const auto statuses = group.Run([&](int rank, Communicator& comm) {
      if (rank == late) {
        absl::SleepFor(absl::Milliseconds(30));
        came = absl::Now();
      }
      const absl::Status status = comm.Barrier();
      left[rank] = absl::Now();
      return status;
    });
    EXPECT_THAT(statuses, Each(kOk));
    for (int rank = 0; rank < size(); ++rank) EXPECT_GE(left[rank], came) << "rank " << rank;
  }
}

TEST_P(CommunicatorTest, KeepsStepWhenEveryRankIsSlowInTurn) {
  RankGroup group(GetParam());
  const auto statuses = group.Run([&](int rank, Communicator& comm) {
    for (int step = 0; step < 12; ++step) {
      if (step % size() == rank) absl::SleepFor(absl::Milliseconds(10));
      std::vector<std::byte> descriptor = Pattern(rank == 0 ? 100 + step : 0, step);
      absl::Status status = comm.Broadcast(descriptor, 0, absl::Seconds(30));
      if (descriptor != Pattern(100 + step, step)) status = absl::InternalError("wrong bytes");
      std::vector<int64_t> scores(step % 3 == 0 ? 50'000 : 100, rank + step);
      if (status.ok()) status = Sum(comm, scores);
      const int64_t want = size() * (size() - 1) / 2 + size() * step;
      if (status.ok() && scores.back() != want) status = absl::InternalError("wrong sum");
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  });
  EXPECT_THAT(statuses, Each(kOk));
}

INSTANTIATE_TEST_SUITE_P(
    All, CommunicatorTest,
    ::testing::Values(GroupParam{CommKind::kLocal, 1}, GroupParam{CommKind::kLocal, 2},
                      GroupParam{CommKind::kLocal, 3}, GroupParam{CommKind::kLocal, 4},
                      GroupParam{CommKind::kGloo, 1}, GroupParam{CommKind::kGloo, 2},
                      GroupParam{CommKind::kGloo, 3}, GroupParam{CommKind::kGloo, 4},
                      GroupParam{CommKind::kNccl, 1}, GroupParam{CommKind::kNccl, 2},
                      GroupParam{CommKind::kNccl, 3}, GroupParam{CommKind::kNccl, 4},
                      GroupParam{CommKind::kStaged, 1}, GroupParam{CommKind::kStaged, 3}),
    [](const auto& info) { return GroupParamName(info.param); });

}  // namespace
}  // namespace heavywater
