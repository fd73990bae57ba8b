#include "worker/backend/cuda/copies.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_check.h"

namespace heavywater::cuda {

absl::StatusOr<DeviceBuffer> Allocate(CudaContext& context, int64_t bytes) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("bytes is ", bytes, ", want at least 0"));
  }
  if (bytes == 0) return DeviceBuffer();
  HW_RETURN_IF_ERROR(context.Enter());
  void* address = nullptr;
  HW_RETURN_IF_CUDA_ERROR(cudaMalloc(&address, bytes));
  const int device = context.device();
  DeviceBuffer buffer(static_cast<std::byte*>(address), bytes, [device](std::byte* memory) {
    // Waits for whatever uses it.
    if (cudaSetDevice(device) == cudaSuccess) cudaFree(memory);
  });
  HW_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(address, 0, bytes, context.setup_stream()));
  HW_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(context.setup_stream()));
  return buffer;
}

// Always through pinned memory: the source may be registered memory, which a copy
// would read after the call returned.
absl::Status CopyToDevice(CudaContext& context, DeviceSpan<std::byte> to,
                          std::span<const std::byte> from, cudaStream_t stream) {
  HW_CHECK(to.size() == static_cast<int64_t>(from.size()));
  HW_RETURN_IF_ERROR(context.JoinCopies(stream));
  int64_t done = 0;
  while (done < to.size()) {
    const int64_t bytes = std::min(to.size() - done, StagingRing::kMaxBytes);
    HW_ASSIGN_OR_RETURN(const StagingRing::Place place, context.ring().Take(bytes));
    std::memcpy(place.host, from.data() + done, bytes);
    HW_RETURN_IF_CUDA_ERROR(cudaMemcpyAsync(to.device_address() + done, place.host, bytes,
                                            cudaMemcpyHostToDevice, stream));
    done += bytes;
    // A copy of its own: what it took may be used again.
    if (done < to.size()) HW_RETURN_IF_ERROR(context.RestartOperation(stream));
  }
  return absl::OkStatus();
}

absl::Status CopyToHost(CudaContext& context, std::span<std::byte> to,
                        DeviceSpan<const std::byte> from, cudaStream_t stream) {
  HW_CHECK(from.size() == static_cast<int64_t>(to.size()));
  if (from.empty()) return absl::OkStatus();
  // What is large comes at once: the copy then waits for the stream, unless the memory
  // is registered.
  if (from.size() > HostResults::kBlockBytes) {
    return HW_CUDA_STATUS(cudaMemcpyAsync(to.data(), from.device_address(), from.size(),
                                          cudaMemcpyDeviceToHost, stream));
  }
  return context.results().Copy(stream, from.device_address(), from.size(),
                                [to](std::span<const std::byte> bytes) {
                                  std::copy(bytes.begin(), bytes.end(), to.begin());
                                  return absl::OkStatus();
                                });
}

absl::Status CopyOnDevice(CudaContext& context, DeviceSpan<std::byte> to,
                          DeviceSpan<const std::byte> from, cudaStream_t stream) {
  HW_CHECK(to.size() == from.size());
  if (to.empty()) return absl::OkStatus();
  HW_RETURN_IF_ERROR(context.JoinCopies(stream));
  return HW_CUDA_STATUS(cudaMemcpyAsync(to.device_address(), from.device_address(), to.size(),
                                        cudaMemcpyDeviceToDevice, stream));
}

absl::Status Zero(CudaContext& context, DeviceSpan<std::byte> span, cudaStream_t stream) {
  if (span.empty()) return absl::OkStatus();
  HW_RETURN_IF_ERROR(context.JoinCopies(stream));
  return HW_CUDA_STATUS(cudaMemsetAsync(span.device_address(), 0, span.size(), stream));
}

absl::Status RegisterHostMemory(CudaContext& context, std::span<std::byte> memory) {
  if (memory.empty()) return absl::OkStatus();
  HW_RETURN_IF_ERROR(context.Enter());
  const absl::Status registered = HW_CUDA_STATUS(cudaHostRegister(
      memory.data(), memory.size(), cudaHostRegisterPortable | cudaHostRegisterMapped));
  if (!registered.ok()) {
    return absl::Status(registered.code(),
                        absl::StrCat("registering ", memory.size(), " bytes of host memory with ",
                                     "device ", context.device(), ": ", registered.message()));
  }
  void* address = nullptr;
  absl::Status status = HW_CUDA_STATUS(cudaHostGetDevicePointer(&address, memory.data(), 0));
  if (status.ok() && address != memory.data()) {
    status = absl::FailedPreconditionError(
        absl::StrCat("device ", context.device(),
                     " sees registered host memory at another address than the host: no recall, no "
                     "write-through"));
  }
  if (!status.ok()) cudaHostUnregister(memory.data());
  return status;
}

absl::Status UnregisterHostMemory(CudaContext& context, std::span<std::byte> memory) {
  if (memory.empty()) return absl::OkStatus();
  HW_RETURN_IF_ERROR(context.Enter());
  return HW_CUDA_STATUS(cudaHostUnregister(memory.data()));
}

}  // namespace heavywater::cuda
