#include "worker/backend/cuda/host_results.h"

#include <cstring>
#include <vector>

#include "tests/worker/backend/cuda/shim_test_base.h"

namespace heavywater::cuda {
namespace {

class HostResultsTest : public ShimTest {
 protected:
  HostResultsTest() {
    EXPECT_EQ(cudaMalloc(&device_, 400), cudaSuccess);
    EXPECT_EQ(cudaMemset(device_, 7, 400), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  ~HostResultsTest() override { EXPECT_EQ(cudaFree(device_), cudaSuccess); }

  HostResults::Deliver Note(int number) {
    return [this, number](std::span<const std::byte> bytes) {
      delivered_.push_back(number);
      complete_ = complete_ && bytes[0] == std::byte{7} && bytes.back() == std::byte{7};
      return absl::OkStatus();
    };
  }

  std::byte* device_ = nullptr;
  std::vector<int> delivered_;
  bool complete_ = true;
};

TEST_F(HostResultsTest, ResultsAreHandedOverInOrderToTheStreamThatWasSynchronised) {
  HostResults results;
  const TestStream first;
  const TestStream second;
  ASSERT_TRUE(results.Copy(first.get(), device_, 100, Note(1)).ok());
  ASSERT_TRUE(results.Copy(second.get(), device_, 400, Note(2)).ok());
  ASSERT_TRUE(results.Copy(first.get(), device_, 1, Note(3)).ok());
  ASSERT_EQ(cudaStreamSynchronize(first.get()), cudaSuccess);
  ASSERT_TRUE(results.HandOver(first.get()).ok());
  EXPECT_EQ(delivered_, (std::vector<int>{1, 3}));
  ASSERT_TRUE(results.HandOver(first.get()).ok());
  ASSERT_EQ(cudaStreamSynchronize(second.get()), cudaSuccess);
  ASSERT_TRUE(results.HandOver(second.get()).ok());
  EXPECT_EQ(delivered_, (std::vector<int>{1, 3, 2}));
  EXPECT_TRUE(complete_);
}

TEST_F(HostResultsTest, WhatADeliveryReturnsIsReported) {
  HostResults results;
  const TestStream stream;
  ASSERT_TRUE(results
                  .Copy(stream.get(), device_, 1,
                        [](std::span<const std::byte>) { return absl::DataLossError("torn"); })
                  .ok());
  ASSERT_TRUE(results.Copy(stream.get(), device_, 1, Note(1)).ok());
  ASSERT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
  EXPECT_EQ(results.HandOver(stream.get()).message(), "torn");
  EXPECT_EQ(delivered_, std::vector<int>{1});
}

TEST_F(HostResultsTest, WhenMemoryIsFullTheOldestAreHandedOverEarly) {
  HostResults results;
  const TestStream stream;
  for (int i = 0; i < HostResults::kMaxBlocks + 2; ++i) {
    const auto memory = results.Expect(stream.get(), HostResults::kBlockBytes, Note(i));
    ASSERT_TRUE(memory.ok()) << memory.status();
    ASSERT_EQ(cudaMemcpyAsync(*memory, device_, 1, cudaMemcpyDeviceToHost, stream.get()),
              cudaSuccess);
    ASSERT_EQ(cudaMemcpyAsync(*memory + HostResults::kBlockBytes - 1, device_, 1,
                              cudaMemcpyDeviceToHost, stream.get()),
              cudaSuccess);
  }
  EXPECT_EQ(static_cast<int>(delivered_.size()), HostResults::kMaxBlocks);
  ASSERT_EQ(cudaStreamSynchronize(stream.get()), cudaSuccess);
  ASSERT_TRUE(results.HandOver(stream.get()).ok());
  EXPECT_EQ(static_cast<int>(delivered_.size()), HostResults::kMaxBlocks + 2);
  EXPECT_TRUE(complete_);
}

TEST_F(HostResultsTest, AResultLargerThanABlockIsRefused) {
  HostResults results;
  const TestStream stream;
  EXPECT_TRUE(absl::IsResourceExhausted(
      results.Expect(stream.get(), HostResults::kBlockBytes + 1, Note(1)).status()));
}

TEST_F(HostResultsTest, ACapturedStreamHasNoResults) {
  HostResults results;
  const TestStream stream;
  ASSERT_EQ(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  EXPECT_TRUE(absl::IsFailedPrecondition(results.Expect(stream.get(), 8, Note(1)).status()));
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream.get(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

}  // namespace
}  // namespace heavywater::cuda
