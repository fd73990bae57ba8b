#include "worker/backend/cuda/staging_ring.h"

#include <numeric>
#include <vector>

#include "tests/worker/backend/cuda/shim_test_base.h"

namespace heavywater::cuda {
namespace {

class StagingRingTest : public ShimTest {
 protected:
  // An operation that uploads `values` and copies them to `to` on `copier`.
  void UploadTo(int32_t* to, const std::vector<int32_t>& values, cudaStream_t stream) {
    ASSERT_TRUE(ring_->Begin(stream).ok());
    const auto uploaded = ring_->Upload(std::span<const int32_t>(values));
    ASSERT_TRUE(uploaded.ok()) << uploaded.status();
    ASSERT_EQ(cudaMemcpyAsync(to, *uploaded, values.size() * 4, cudaMemcpyDeviceToDevice, stream),
              cudaSuccess);
    ASSERT_TRUE(ring_->End().ok());
  }

  std::unique_ptr<StagingRing> ring_ = StagingRing::Create().value();
};

std::vector<int32_t> Numbers(int32_t first, int64_t count) {
  std::vector<int32_t> values(count);
  std::iota(values.begin(), values.end(), first);
  return values;
}

TEST_F(StagingRingTest, WhatIsStillToBeReadIsNotOverwritten) {
  constexpr int kOperations = 5 * StagingRing::kSegments;
  constexpr int64_t kCount = StagingRing::kSegmentBytes / 4 * 3 / 5;  // no two fit a segment
  const TestStream first;
  const TestStream second;
  int32_t* device = nullptr;
  ASSERT_EQ(cudaMalloc(&device, kOperations * kCount * 4), cudaSuccess);
  for (int i = 0; i < kOperations; ++i) {
    UploadTo(device + i * kCount, Numbers(i * 1000, kCount),
             i % 3 == 0 ? first.get() : second.get());
  }
  ASSERT_EQ(cudaStreamSynchronize(first.get()), cudaSuccess);
  ASSERT_EQ(cudaStreamSynchronize(second.get()), cudaSuccess);
  std::vector<int32_t> read(kCount);
  for (int i = 0; i < kOperations; ++i) {
    ASSERT_EQ(cudaMemcpy(read.data(), device + i * kCount, kCount * 4, cudaMemcpyDeviceToHost),
              cudaSuccess);
    EXPECT_EQ(read, Numbers(i * 1000, kCount)) << "operation " << i;
  }
  ASSERT_EQ(cudaFree(device), cudaSuccess);
}

TEST_F(StagingRingTest, AnOperationMayUseWhatItTookOnAnotherStream) {
  constexpr int64_t kCount = StagingRing::kSegmentBytes / 4;
  const TestStream main;
  const TestStream side;
  cudaEvent_t sent = nullptr;
  ASSERT_EQ(cudaEventCreate(&sent), cudaSuccess);
  int32_t* device = nullptr;
  ASSERT_EQ(cudaMalloc(&device, kCount * 4), cudaSuccess);
  ASSERT_TRUE(ring_->Begin(main.get()).ok());
  const auto uploaded = ring_->Upload(std::span<const int32_t>(Numbers(7, kCount)));
  ASSERT_TRUE(uploaded.ok()) << uploaded.status();
  ring_->AlsoUsedOn(side.get());
  ASSERT_EQ(cudaEventRecord(sent, main.get()), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(side.get(), sent), cudaSuccess);
  ASSERT_EQ(cudaMemcpyAsync(device, *uploaded, kCount * 4, cudaMemcpyDeviceToDevice, side.get()),
            cudaSuccess);
  ASSERT_TRUE(ring_->End().ok());
  // A whole ring later, with the main stream done and the side stream not.
  for (int i = 0; i < StagingRing::kSegments + 1; ++i) {
    ASSERT_TRUE(ring_->Begin(main.get()).ok());
    ASSERT_TRUE(ring_->Upload(std::span<const int32_t>(Numbers(-1000000, kCount))).ok());
    ASSERT_TRUE(ring_->End().ok());
    ASSERT_EQ(cudaStreamSynchronize(main.get()), cudaSuccess);
  }
  ASSERT_EQ(cudaStreamSynchronize(side.get()), cudaSuccess);
  std::vector<int32_t> read(kCount);
  ASSERT_EQ(cudaMemcpy(read.data(), device, kCount * 4, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(read, Numbers(7, kCount));
  ASSERT_EQ(cudaFree(device), cudaSuccess);
  ASSERT_EQ(cudaEventDestroy(sent), cudaSuccess);
}

TEST_F(StagingRingTest, TheCallersMemoryIsReadAtOnce) {
  const TestStream stream;
  int32_t* device = nullptr;
  ASSERT_EQ(cudaMalloc(&device, 400), cudaSuccess);
  std::vector<int32_t> values = Numbers(5, 100);
  UploadTo(device, values, stream.get());
  std::fill(values.begin(), values.end(), -1);
  ASSERT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
  ASSERT_EQ(cudaMemcpy(values.data(), device, 400, cudaMemcpyDeviceToHost), cudaSuccess);
  EXPECT_EQ(values, Numbers(5, 100));
  ASSERT_EQ(cudaFree(device), cudaSuccess);
}

TEST_F(StagingRingTest, MoreThanThereIsRoomForIsRefused) {
  const TestStream stream;
  ASSERT_TRUE(ring_->Begin(stream.get()).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(ring_->Take(StagingRing::kMaxBytes + 1).status()));
  for (int i = 0; i < StagingRing::kSegments; ++i) {
    EXPECT_TRUE(ring_->Take(StagingRing::kMaxBytes).ok());
  }
  EXPECT_TRUE(absl::IsResourceExhausted(ring_->Take(1).status()));
  ASSERT_TRUE(ring_->End().ok());
}

TEST_F(StagingRingTest, WhatAGraphReadsIsKept) {
  const TestStream stream;
  int32_t* device = nullptr;
  ASSERT_EQ(cudaMalloc(&device, 400), cudaSuccess);
  ASSERT_EQ(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  UploadTo(device, Numbers(3, 100), stream.get());
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaSuccess);
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph), cudaSuccess);
  const std::vector<int32_t> large = Numbers(0, StagingRing::kSegmentBytes / 4);
  for (int i = 0; i < 2 * StagingRing::kSegments; ++i) {
    ASSERT_TRUE(ring_->Begin(stream.get()).ok());
    ASSERT_TRUE(ring_->Upload(std::span<const int32_t>(large)).ok());
    ASSERT_TRUE(ring_->End().ok());
  }
  for (int replay = 0; replay < 2; ++replay) {
    ASSERT_EQ(cudaMemset(device, 0, 400), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    ASSERT_EQ(cudaGraphLaunch(exec, stream.get()), cudaSuccess);
    ASSERT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
    std::vector<int32_t> read(100);
    ASSERT_EQ(cudaMemcpy(read.data(), device, 400, cudaMemcpyDeviceToHost), cudaSuccess);
    EXPECT_EQ(read, Numbers(3, 100));
  }
  ASSERT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  ASSERT_EQ(cudaFree(device), cudaSuccess);
}

}  // namespace
}  // namespace heavywater::cuda
