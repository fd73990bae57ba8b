// What the operations of one CudaBackend share: the device, and the ways between its
// memory and the host's. One thread at a time.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/cuda/faults.h"
#include "worker/backend/cuda/host_results.h"
#include "worker/backend/cuda/staging_ring.h"
#include "worker/backend/cuda/write_through.h"
#include "worker/backend/device_buffer.h"

namespace heavywater::cuda {

// A Stream without a handle is CUDA's default stream: for every library the same.
inline cudaStream_t HandleOf(const Stream& stream) {
  return static_cast<cudaStream_t>(stream.handle);
}

class CudaContext {
 public:
  // FAILED_PRECONDITION when there is no such device.
  static absl::StatusOr<std::unique_ptr<CudaContext>> Create(int device);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  int device() const { return device_; }
  const cudaDeviceProp& properties() const { return properties_; }

  StagingRing& ring() { return *ring_; }
  HostResults& results() { return results_; }
  Faults& faults() { return *faults_; }
  WriteThrough& copies() { return *copies_; }

  // The device's address of values in host memory, which are read now; 256-byte aligned.
  // For work of this operation on its stream (StagingRing::Upload).
  template <typename T>
  absl::StatusOr<const T*> Upload(std::span<const T> values) {
    return ring_->Upload(values);
  }
  // Before work on `stream` that reads host pages or overwrites K and V.
  absl::Status JoinCopies(cudaStream_t stream) { return copies_->Join(stream); }

  // For what must be done when a call returns: nothing else is enqueued there.
  cudaStream_t setup_stream() const { return setup_stream_; }

  // Around an operation of the backend: the calling thread's device, the ring's uses.
  absl::Status BeginOperation(cudaStream_t stream);
  absl::Status EndOperation() { return ring_->End(); }
  // For an operation in pieces: what it took for work that is enqueued may be reused.
  absl::Status RestartOperation(cudaStream_t stream);
  // As Backend's.
  absl::Status Synchronize(cudaStream_t stream);
  // The calling thread's device.
  absl::Status Enter() const;

 private:
  CudaContext() = default;

  int device_ = 0;
  cudaDeviceProp properties_ = {};
  cudaStream_t setup_stream_ = nullptr;
  std::unique_ptr<WriteThrough> copies_;
  HostResults results_;
  std::unique_ptr<StagingRing> ring_;
  std::unique_ptr<Faults> faults_;
};

}  // namespace heavywater::cuda
