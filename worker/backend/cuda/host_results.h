// Results of operations on their way to host memory that is not the device's to write:
// spans of RecallView, CopyToHost(). The device leaves them in pinned memory;
// Synchronize() hands them over.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace heavywater::cuda {

class HostResults {
 public:
  // Pinned memory in all, in blocks; when it is full, the host waits for the device and
  // hands over early.
  static constexpr int64_t kBlockBytes = int64_t{4} << 20;
  static constexpr int kMaxBlocks = 16;

  // Called once the device has written `bytes`, by Synchronize() or earlier, in the
  // order of the calls of one stream. What it returns Synchronize() returns.
  using Deliver = std::function<absl::Status(std::span<const std::byte> bytes)>;

  HostResults() = default;
  ~HostResults();
  HostResults(const HostResults&) = delete;
  HostResults& operator=(const HostResults&) = delete;

  // Pinned memory, 256-byte aligned, for work on `stream` that is enqueued next: kernels
  // may write it themselves (StoreHost(); the device's address is the host's).
  // RESOURCE_EXHAUSTED above kBlockBytes; FAILED_PRECONDITION while the stream is captured: a graph
  // that is replayed delivers nothing.
  absl::StatusOr<std::byte*> Expect(cudaStream_t stream, int64_t bytes, Deliver deliver);
  // Likewise, with the copy from device memory.
  absl::Status Copy(cudaStream_t stream, const void* device, int64_t bytes, Deliver deliver);

  // Hands over what `stream` has; it has been synchronised.
  absl::Status HandOver(cudaStream_t stream);

 private:
  struct Block {
    std::byte* memory = nullptr;
    int64_t used = 0;
    int64_t pending = 0;
  };
  struct Result {
    cudaStream_t stream;
    Block* block;
    std::span<const std::byte> bytes;
    Deliver deliver;
  };

  absl::StatusOr<Block*> FindRoom(int64_t bytes);
  absl::Status Drain();

  std::vector<std::unique_ptr<Block>> blocks_;
  Block* current_ = nullptr;
  std::vector<Result> results_;
  absl::Status early_;  // what failed when results were handed over early
};

}  // namespace heavywater::cuda
