#include "worker/comm/nccl/device_stream.h"

#include <cuda_runtime.h>

#include "worker/backend/cuda/cuda_check.h"

namespace heavywater {

absl::Status UseDevice(int device) { return HW_CUDA_STATUS(cudaSetDevice(device)); }

absl::Status SynchronizeStream(const Stream& stream) {
  return HW_CUDA_STATUS(cudaStreamSynchronize(static_cast<cudaStream_t>(stream.handle)));
}

}  // namespace heavywater
