// Allocation, copies, registration.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <vector>

#include "cuda_shim.h"
#include "memory_map.h"
#include "runtime_api.h"
#include "streams.h"

namespace heavywater::cuda_shim {

cudaError_t ReportFailure(std::string failure);

namespace {

// What a copy reads or writes, as the runtime tells kinds apart.
bool IsValid(const void* address, int64_t bytes) {
  return !IsDeviceAddress(address) || IsDeviceRange(address, bytes);
}

bool FitsKind(const void* to, const void* from, cudaMemcpyKind kind) {
  const bool to_device = IsDeviceAddress(to);
  const bool from_device = IsDeviceAddress(from);
  switch (kind) {
    case cudaMemcpyHostToHost:
      return !to_device && !from_device;
    case cudaMemcpyHostToDevice:
      return to_device && !from_device;
    case cudaMemcpyDeviceToHost:
      return !to_device && from_device;
    case cudaMemcpyDeviceToDevice:
      return to_device && from_device;
    case cudaMemcpyDefault:
      return true;
  }
  return false;
}

struct Copy {
  std::byte* to;
  size_t to_pitch;
  const std::byte* from;
  size_t from_pitch;
  size_t width;
  size_t height;
};

void Perform(const Copy& copy) {
  for (size_t row = 0; row < copy.height; ++row) {
    std::memmove(copy.to + row * copy.to_pitch, copy.from + row * copy.from_pitch, copy.width);
  }
}
int64_t Span(size_t pitch, const Copy& copy) {
  return static_cast<int64_t>(pitch * (copy.height - 1) + copy.width);
}

// Pageable memory is read before the call returns, and written before it returns,
// after the stream's earlier work.
cudaError_t EnqueueCopy(const Copy& copy, cudaMemcpyKind kind, cudaStream_t stream) {
  if (copy.width == 0 || copy.height == 0) return cudaSuccess;
  const int64_t to_bytes = Span(copy.to_pitch, copy);
  const int64_t from_bytes = Span(copy.from_pitch, copy);
  if (!FitsKind(copy.to, copy.from, kind)) return cudaErrorInvalidMemcpyDirection;
  if (!IsValid(copy.to, to_bytes) || !IsValid(copy.from, from_bytes)) return cudaErrorInvalidValue;
  const bool from_pageable = !IsDeviceAddress(copy.from) && !IsPinnedRange(copy.from, from_bytes);
  const bool to_pageable = !IsDeviceAddress(copy.to) && !IsPinnedRange(copy.to, to_bytes);
  if (IsCapturing(stream) && (from_pageable || to_pageable)) {
    return cudaErrorStreamCaptureUnsupported;
  }
  if (from_pageable) {
    std::vector<std::byte> staged(copy.from, copy.from + from_bytes);
    return Enqueue(stream, [copy, staged = std::move(staged)] {
      Copy from_staged = copy;
      from_staged.from = staged.data();
      Perform(from_staged);
      return cudaSuccess;
    });
  }
  const cudaError_t error = Enqueue(stream, [copy] {
    Perform(copy);
    return cudaSuccess;
  });
  if (error != cudaSuccess || !to_pageable) return error;
  return Finish(stream);
}

cudaError_t Free(void* address) {
  if (address == nullptr) return cudaSuccess;
  std::string damage;
  if (!FreeDevice(address, damage)) return cudaErrorInvalidValue;
  return damage.empty() ? cudaSuccess : ReportFailure(std::move(damage));
}

}  // namespace
}  // namespace heavywater::cuda_shim

using heavywater::cuda_shim::AnyCapture;
using heavywater::cuda_shim::Enqueue;
using heavywater::cuda_shim::EnqueueCopy;
using heavywater::cuda_shim::Finish;
using heavywater::cuda_shim::FinishAll;
using heavywater::cuda_shim::RuntimeLock;

cudaError_t cudaMalloc(void** address, size_t bytes) {
  const RuntimeLock lock;
  if (AnyCapture()) return cudaErrorStreamCaptureUnsupported;
  *address = nullptr;
  if (bytes == 0) return cudaSuccess;
  if (bytes > heavywater::cuda_shim::kDeviceBytes) return cudaErrorMemoryAllocation;
  *address = heavywater::cuda_shim::AllocateDevice(static_cast<int64_t>(bytes));
  return *address == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  const RuntimeLock lock;
  if (address == nullptr) return cudaSuccess;
  if (const cudaError_t error = FinishAll(); error != cudaSuccess) return error;
  const cudaError_t freed = heavywater::cuda_shim::Free(address);
  if (freed == cudaErrorLaunchFailure) heavywater::cuda_shim::SetStickyError(freed);
  return freed;
}
cudaError_t cudaMallocAsync(void** address, size_t bytes, cudaStream_t stream) {
  return cudaMalloc(address, bytes);
}
cudaError_t cudaFreeAsync(void* address, cudaStream_t stream) {
  const RuntimeLock lock;
  return Enqueue(stream, [address] { return heavywater::cuda_shim::Free(address); });
}
cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  const RuntimeLock lock;
  *total = heavywater::cuda_shim::CurrentOptions().device_memory_bytes;
  *free = *total - heavywater::cuda_shim::DeviceBytesAllocated();
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return cudaMemcpy2DAsync(to, bytes, from, bytes, bytes, 1, kind, stream);
}
cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch,
                              size_t width, size_t height, cudaMemcpyKind kind,
                              cudaStream_t stream) {
  const RuntimeLock lock;
  return EnqueueCopy({.to = static_cast<std::byte*>(to),
                      .to_pitch = to_pitch,
                      .from = static_cast<const std::byte*>(from),
                      .from_pitch = from_pitch,
                      .width = width,
                      .height = height},
                     kind, stream);
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  const RuntimeLock lock;
  if (AnyCapture()) return cudaErrorStreamCaptureUnsupported;
  if (const cudaError_t error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
      error != cudaSuccess) {
    return error;
  }
  return Finish(nullptr);
}
cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t stream) {
  const RuntimeLock lock;
  if (!heavywater::cuda_shim::IsDeviceRange(to, static_cast<int64_t>(bytes))) {
    return cudaErrorInvalidValue;
  }
  return Enqueue(stream, [to, value, bytes] {
    std::memset(to, value, bytes);
    return cudaSuccess;
  });
}
cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, nullptr);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  const RuntimeLock lock;
  void* const pointer = const_cast<void*>(address);
  *attributes = {.type = cudaMemoryTypeUnregistered,
                 .device = 0,
                 .devicePointer = nullptr,
                 .hostPointer = pointer};
  if (heavywater::cuda_shim::IsDeviceAddress(address)) {
    *attributes = {.type = cudaMemoryTypeDevice,
                   .device = 0,
                   .devicePointer = pointer,
                   .hostPointer = nullptr};
  } else if (heavywater::cuda_shim::IsPinnedRange(address, 1)) {
    attributes->type = cudaMemoryTypeHost;
    attributes->devicePointer = pointer;
  }
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** address, size_t bytes, unsigned flags) {
  const RuntimeLock lock;
  if (AnyCapture()) return cudaErrorStreamCaptureUnsupported;
  *address = heavywater::cuda_shim::AllocateHost(static_cast<int64_t>(bytes));
  return *address == nullptr ? cudaErrorMemoryAllocation : cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
  const RuntimeLock lock;
  if (const cudaError_t error = FinishAll(); error != cudaSuccess) return error;
  return heavywater::cuda_shim::FreeHost(address) ? cudaSuccess : cudaErrorInvalidValue;
}
cudaError_t cudaHostRegister(void* address, size_t bytes, unsigned flags) {
  const RuntimeLock lock;
  if (address == nullptr || bytes == 0) return cudaErrorInvalidValue;
  return heavywater::cuda_shim::RegisterHost(address, static_cast<int64_t>(bytes))
             ? cudaSuccess
             : cudaErrorHostMemoryAlreadyRegistered;
}
cudaError_t cudaHostUnregister(void* address) {
  const RuntimeLock lock;
  if (const cudaError_t error = FinishAll(); error != cudaSuccess) return error;
  return heavywater::cuda_shim::UnregisterHost(address) ? cudaSuccess
                                                        : cudaErrorHostMemoryNotRegistered;
}
cudaError_t cudaHostGetDevicePointer(void** device, void* host, unsigned flags) {
  const RuntimeLock lock;
  if (!heavywater::cuda_shim::IsPinnedRange(host, 1)) return cudaErrorInvalidValue;
  *device = host;
  return cudaSuccess;
}
