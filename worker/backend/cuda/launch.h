// The one way to start a kernel.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <utility>

namespace heavywater::cuda {

// Above this the kernel's limit of dynamic shared memory must be raised first.
inline constexpr size_t kDefaultSharedBytes = 48 * 1024;

// kernel<<<grid, block, shared_bytes, stream>>>(args...); an empty grid starts
// nothing.
template <typename... Params, typename... Args>
cudaError_t Launch(void (*kernel)(Params...), dim3 grid, dim3 block, size_t shared_bytes,
                   cudaStream_t stream, Args&&... args) {
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) return cudaSuccess;
  if (shared_bytes > kDefaultSharedBytes) {
    const cudaError_t raised = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                    cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                    static_cast<int>(shared_bytes));
    if (raised != cudaSuccess) return raised;
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
}

}  // namespace heavywater::cuda
