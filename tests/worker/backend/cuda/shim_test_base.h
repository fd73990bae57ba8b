// Tests of the CUDA backend's parts on the host shim.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "gtest/gtest.h"
#include "tests/worker/backend/cuda_shim/cuda_shim.h"
#include "worker/backend/cuda/context.h"

namespace heavywater::cuda {

// Work runs when it is waited for, unless a test says otherwise: what lacks a
// synchronisation then reads too early.
class ShimTest : public testing::Test {
 protected:
  ShimTest() { cuda_shim::SetOptions({.progress = cuda_shim::Progress::kLate}); }
  ~ShimTest() override {
    EXPECT_EQ(cuda_shim::TakeFailure(), "");
    EXPECT_EQ(cuda_shim::DamagedGuards(), "");
    cuda_shim::SetOptions({});
  }
};

// A stream that waits for no other.
class TestStream {
 public:
  TestStream() {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  ~TestStream() { cudaStreamDestroy(stream_); }
  TestStream(const TestStream&) = delete;
  TestStream& operator=(const TestStream&) = delete;
  cudaStream_t get() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

}  // namespace heavywater::cuda
