#include "worker/backend/cuda/context.h"

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_check.h"

namespace heavywater::cuda {

absl::StatusOr<std::unique_ptr<CudaContext>> CudaContext::Create(int device) {
  int count = 0;
  const cudaError_t counted = cudaGetDeviceCount(&count);
  if (counted == cudaErrorNoDevice || counted == cudaErrorInsufficientDriver) {
    return absl::FailedPreconditionError(
        absl::StrCat("there is no CUDA device here: ", cudaGetErrorString(counted)));
  }
  HW_RETURN_IF_CUDA_ERROR(counted);
  if (device < 0 || device >= count) {
    return absl::FailedPreconditionError(
        absl::StrCat("device is ", device, ", want less than ", count, ", the CUDA devices here"));
  }
  std::unique_ptr<CudaContext> context(new CudaContext);
  context->device_ = device;
  HW_RETURN_IF_ERROR(context->Enter());
  HW_RETURN_IF_CUDA_ERROR(cudaGetDeviceProperties(&context->properties_, device));
  HW_RETURN_IF_CUDA_ERROR(
      cudaStreamCreateWithFlags(&context->setup_stream_, cudaStreamNonBlocking));
  HW_ASSIGN_OR_RETURN(context->copies_, WriteThrough::Create());
  HW_ASSIGN_OR_RETURN(context->ring_, StagingRing::Create());
  HW_ASSIGN_OR_RETURN(context->faults_, Faults::Create());
  return context;
}

CudaContext::~CudaContext() {
  Enter().IgnoreError();
  if (setup_stream_ != nullptr) cudaStreamDestroy(setup_stream_);
}

absl::Status CudaContext::Enter() const { return HW_CUDA_STATUS(cudaSetDevice(device_)); }

absl::Status CudaContext::RestartOperation(cudaStream_t stream) {
  HW_RETURN_IF_ERROR(ring_->End());
  return ring_->Begin(stream);
}

absl::Status CudaContext::Synchronize(cudaStream_t stream) {
  HW_RETURN_IF_ERROR(copies_->Join(stream));
  HW_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream));
  absl::Status status = faults_->Take();
  status.Update(results_.HandOver(stream));
  return status;
}

absl::Status CudaContext::BeginOperation(cudaStream_t stream) {
  HW_RETURN_IF_ERROR(Enter());
  return ring_->Begin(stream);
}

}  // namespace heavywater::cuda
