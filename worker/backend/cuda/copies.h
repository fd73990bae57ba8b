// Memory and copies of CudaBackend. Arguments as Backend's operations of these names;
// those with a stream within an operation of `context`.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/cuda/context.h"
#include "worker/backend/device_buffer.h"

namespace heavywater::cuda {

absl::StatusOr<DeviceBuffer> Allocate(CudaContext& context, int64_t bytes);
absl::Status CopyToDevice(CudaContext& context, DeviceSpan<std::byte> to,
                          std::span<const std::byte> from, cudaStream_t stream);
absl::Status CopyToHost(CudaContext& context, std::span<std::byte> to,
                        DeviceSpan<const std::byte> from, cudaStream_t stream);
absl::Status CopyOnDevice(CudaContext& context, DeviceSpan<std::byte> to,
                          DeviceSpan<const std::byte> from, cudaStream_t stream);
absl::Status Zero(CudaContext& context, DeviceSpan<std::byte> span, cudaStream_t stream);

// Kernels reach registered memory at the host's address; FAILED_PRECONDITION on a
// device that has another one for it.
absl::Status RegisterHostMemory(CudaContext& context, std::span<std::byte> memory);
absl::Status UnregisterHostMemory(CudaContext& context, std::span<std::byte> memory);

}  // namespace heavywater::cuda
