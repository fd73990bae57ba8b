// The NCCL communicator on real GPUs: one rank, and one for each GPU there is. Ranks
// are threads. Skipped, visibly, where there is none.
#include <cuda_runtime.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/comm/nccl/nccl_options.h"

namespace heavywater {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

int NumGpus() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

// A vector in device memory, and its way to and from the host on a stream.
template <typename T>
class DeviceVector {
 public:
  DeviceVector(const std::vector<T>& values, cudaStream_t stream)
      : size_(values.size()), stream_(stream) {
    HW_CHECK(cudaMalloc(reinterpret_cast<void**>(&data_), bytes() + 1) == cudaSuccess);
    HW_CHECK(cudaMemcpyAsync(data_, values.data(), bytes(), cudaMemcpyHostToDevice, stream) ==
             cudaSuccess);
    HW_CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
  }
  ~DeviceVector() { cudaFree(data_); }
  DeviceSpan<T> span() const { return {data_, static_cast<int64_t>(size_)}; }
  std::vector<T> Read() const {
    std::vector<T> values(size_);
    HW_CHECK(cudaMemcpyAsync(values.data(), data_, bytes(), cudaMemcpyDeviceToHost, stream_) ==
             cudaSuccess);
    HW_CHECK(cudaStreamSynchronize(stream_) == cudaSuccess);
    return values;
  }

 private:
  size_t bytes() const { return size_ * sizeof(T); }
  const size_t size_;
  const cudaStream_t stream_;
  T* data_ = nullptr;
};

// What a rank's thread works with.
struct Rank {
  Communicator& comm;
  Stream stream;
  cudaStream_t handle() const { return static_cast<cudaStream_t>(stream.handle); }
};
using Body = std::function<absl::Status(Rank& rank)>;

absl::Status RunRank(int rank, int size, const std::string& prefix, RendezvousStore& store,
                     const Body& body) {
  HW_ASSIGN_OR_RETURN(auto comm, CreateNcclCommunicator({.rank = rank,
                                                         .size = size,
                                                         .device = rank,
                                                         .timeout = absl::Seconds(60),
                                                         .key_prefix = prefix},
                                                        store));
  cudaStream_t stream;
  HW_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  Rank here{.comm = *comm, .stream = {.handle = stream}};
  absl::Status status = body(here);
  comm.reset();
  cudaStreamDestroy(stream);
  return status;
}

class NcclDeviceTest : public ::testing::TestWithParam<bool> {
 protected:
  void SetUp() override {
    if (NumGpus() == 0) GTEST_SKIP() << "no GPU";
    if (!GetParam()) return;
    if (NumGpus() == 1) GTEST_SKIP() << "one GPU";
    size_ = NumGpus();
  }

  // `body` on all ranks of a new group.
  std::vector<absl::Status> RunRanks(const Body& body) {
    const std::string prefix = "g/" + std::to_string(++epoch_) + "/";
    std::vector<absl::Status> statuses(size_);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size_; ++rank) {
      threads.emplace_back(
          [&, rank] { statuses[rank] = RunRank(rank, size_, prefix, store_, body); });
    }
    for (std::thread& thread : threads) thread.join();
    return statuses;
  }

  InProcessRendezvous store_;
  int epoch_ = 0;
  int size_ = 1;
};

TEST_P(NcclDeviceTest, SumsIntegersExactly) {
  constexpr int64_t kBig = int64_t{1} << 60;
  EXPECT_THAT(RunRanks([&](Rank& rank) {
                for (const int64_t length : {0, 1, 1023, 1'000'000}) {
                  std::vector<int64_t> mine(length), want(length);
                  for (int64_t i = 0; i < length; ++i) {
                    mine[i] = kBig + i * (rank.comm.rank() + 1);
                    want[i] = kBig * size_ + i * (size_ * (size_ + 1) / 2);
                  }
                  DeviceVector<int64_t> data(mine, rank.handle());
                  HW_RETURN_IF_ERROR(rank.comm.AllReduceSum(data.span(), rank.stream));
                  HW_RETURN_IF_ERROR(rank.comm.Settle(rank.stream));
                  if (data.Read() != want) return absl::InternalError("wrong sum");
                }
                return absl::OkStatus();
              }),
              Each(absl::OkStatus()));
}

TEST_P(NcclDeviceTest, SumsFloatsWithTheSameBitsOnEveryRank) {
  std::vector<std::vector<float>> sums(size_);
  EXPECT_THAT(RunRanks([&](Rank& rank) {
                std::vector<float> mine(100'003);
                for (size_t i = 0; i < mine.size(); ++i) {
                  mine[i] = 1.0f / static_cast<float>(1 + i % 97 + rank.comm.rank());
                }
                DeviceVector<float> data(mine, rank.handle());
                HW_RETURN_IF_ERROR(rank.comm.AllReduceSum(data.span(), rank.stream));
                HW_RETURN_IF_ERROR(rank.comm.Settle(rank.stream));
                sums[rank.comm.rank()] = data.Read();
                return absl::OkStatus();
              }),
              Each(absl::OkStatus()));
  for (const std::vector<float>& of_rank : sums) {
    EXPECT_EQ(std::memcmp(of_rank.data(), sums[0].data(), sums[0].size() * sizeof(float)), 0);
  }
  for (size_t i = 0; i < sums[0].size(); ++i) {
    double want = 0;
    for (int rank = 0; rank < size_; ++rank) want += 1.0 / (1 + i % 97 + rank);
    ASSERT_NEAR(sums[0][i], want, 1e-6 * size_);
  }
}

TEST_P(NcclDeviceTest, GathersInRankOrder) {
  EXPECT_THAT(RunRanks([&](Rank& rank) {
                const int64_t length = 4097;
                std::vector<float> want;
                for (int other = 0; other < size_; ++other)
                  want.insert(want.end(), length, other + 0.5f);
                DeviceVector<float> in(std::vector<float>(length, rank.comm.rank() + 0.5f),
                                       rank.handle());
                DeviceVector<float> out(std::vector<float>(length * size_, -1.0f), rank.handle());
                HW_RETURN_IF_ERROR(rank.comm.AllGather(in.span(), out.span(), rank.stream));
                HW_RETURN_IF_ERROR(rank.comm.Settle(rank.stream));
                return out.Read() == want ? absl::OkStatus() : absl::InternalError("wrong order");
              }),
              Each(absl::OkStatus()));
}

TEST_P(NcclDeviceTest, RunsManyStepsOfManyCallsBetweenBroadcasts) {
  EXPECT_THAT(
      RunRanks([&](Rank& rank) {
        DeviceVector<float> hidden(std::vector<float>(4096, 1.0f), rank.handle());
        for (int step = 0; step < 50; ++step) {
          std::vector<std::byte> descriptor(100);
          HW_RETURN_IF_ERROR(rank.comm.Broadcast(descriptor, 0, absl::Seconds(60)));
          for (int call = 0; call < 64; ++call) {
            HW_RETURN_IF_ERROR(rank.comm.AllReduceSum(hidden.span().Sub(0, 64), rank.stream));
          }
          HW_RETURN_IF_ERROR(rank.comm.Settle(rank.stream));
        }
        return rank.comm.Barrier();
      }),
      Each(absl::OkStatus()));
}

TEST_P(NcclDeviceTest, RefusesKnownCallsThatDifferAndFormsAgain) {
  if (size_ == 1) GTEST_SKIP() << "one rank";
  const auto statuses = RunRanks([&](Rank& rank) {
    DeviceVector<float> data(std::vector<float>(700, 1.0f), rank.handle());
    for (const int64_t length : {700, 500}) {
      HW_RETURN_IF_ERROR(rank.comm.AllReduceSum(data.span().Sub(0, length), rank.stream));
    }
    HW_RETURN_IF_ERROR(rank.comm.Settle(rank.stream));
    const int64_t length = rank.comm.rank() == 1 ? 700 : 500;
    HW_RETURN_IF_ERROR(rank.comm.AllReduceSum(data.span().Sub(0, length), rank.stream));
    return rank.comm.Settle(rank.stream);
  });
  for (const absl::Status& status : statuses) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("of 700 float32"));
    EXPECT_THAT(std::string(status.message()), HasSubstr("of 500 float32"));
  }
  EXPECT_THAT(RunRanks([](Rank& rank) { return rank.comm.Barrier(); }), Each(absl::OkStatus()));
}

TEST_P(NcclDeviceTest, AbortEndsAWaitForARankThatDoesNotCome) {
  if (size_ == 1) GTEST_SKIP() << "one rank";
  const absl::Time start = absl::Now();
  const auto statuses = RunRanks([&](Rank& rank) {
    DeviceVector<float> data(std::vector<float>(100, 1.0f), rank.handle());
    HW_RETURN_IF_ERROR(rank.comm.AllReduceSum(data.span(), rank.stream));
    HW_RETURN_IF_ERROR(rank.comm.Settle(rank.stream));
    if (rank.comm.rank() == 0) {
      absl::SleepFor(absl::Milliseconds(500));
      rank.comm.Abort(absl::AbortedError("epoch over"));
      return rank.comm.Barrier();
    }
    HW_RETURN_IF_ERROR(rank.comm.AllReduceSum(data.span(), rank.stream));
    // As a backend waits: only the abort of NCCL's work ends this.
    HW_CHECK(cudaStreamSynchronize(rank.handle()) == cudaSuccess);
    return rank.comm.Settle(rank.stream);
  });
  EXPECT_LT(absl::Now() - start, absl::Seconds(30));
  EXPECT_TRUE(absl::IsAborted(statuses[0])) << statuses[0];
  for (int rank = 1; rank < size_; ++rank) {
    EXPECT_TRUE(absl::IsUnavailable(statuses[rank])) << statuses[rank];
  }
}

INSTANTIATE_TEST_SUITE_P(All, NcclDeviceTest, ::testing::Bool(), [](const auto& info) {
  return std::string(info.param ? "EveryGpu" : "OneGpu");
});

}  // namespace
}  // namespace heavywater
