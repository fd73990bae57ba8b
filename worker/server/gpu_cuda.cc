// A build with CUDA.
#include <cuda_runtime.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/model/cuda/cuda_llama_runner.h"
#include "worker/server/gpu.h"

namespace heavywater {
namespace {

// A driver that is missing or too old counts as no device.
absl::Status CheckDevice(int device) {
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted != cudaSuccess || count == 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("backend is \"cuda\" and this process sees no GPU: cudaGetDeviceCount: ",
                     cudaGetErrorString(counted)));
  }
  if (device >= 0 && device < count) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("device is ", device, ", want 0 to ", count - 1,
                                                 ": this process sees ", count,
                                                 count == 1 ? " GPU" : " GPUs"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> CreateGpuBackend(int device) {
  HW_RETURN_IF_ERROR(CheckDevice(device));
  return CreateCudaBackend({.device = device});
}

absl::StatusOr<std::string> GpuIdentity(int device) {
  HW_RETURN_IF_ERROR(CheckDevice(device));
  cudaDeviceProp properties;
  HW_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&properties, device));
  return absl::StrCat("GPU-", absl::BytesToHexString(absl::string_view(properties.uuid.bytes,
                                                                       sizeof(properties.uuid))));
}

absl::StatusOr<std::unique_ptr<LlamaRunner>> CreateGpuRunner(const ModelFile& file,
                                                             Communicator& communicator,
                                                             Backend& backend,
                                                             const GpuRunnerOptions& options) {
  HW_ASSIGN_OR_RETURN(const WeightType weights, ParseWeightType(options.weights_dtype));
  HW_RETURN_IF_CUDA_ERROR(cudaSetDevice(options.device));
  HW_ASSIGN_OR_RETURN(auto matmul, CreateCublasMatmul());
  return CudaLlamaRunner::Create(
      file, communicator, backend, std::move(matmul),
      {.device = options.device, .max_batch_tokens = options.max_batch_tokens, .weights = weights});
}

}  // namespace heavywater
