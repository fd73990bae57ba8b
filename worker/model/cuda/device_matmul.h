// Products of weights with rows, on a device. cuBLAS; tests put a plain loop here.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/model/cuda/runner_bytes.h"

namespace heavywater {

// out[t][r] = sum over c of weights[r][c] * x[t][c], summed in float32. All in device
// memory; columns of `out` beyond `rows` are not written.
struct DeviceMatmulArgs {
  WeightType type = WeightType::kFloat32;
  const void* weights = nullptr;  // [rows][cols] of the type
  const void* x = nullptr;        // [tokens][cols] of the type
  float* out = nullptr;           // [tokens][out_stride], out_stride >= rows
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t tokens = 0;
  int64_t out_stride = 0;
};

// Used by one thread at a time.
class DeviceMatmul {
 public:
  virtual ~DeviceMatmul() = default;
  // Queued on `stream`. `scratch` is device memory of kMatmulScratchBytes, the same in
  // every call.
  virtual absl::Status Run(const DeviceMatmulArgs& args, std::byte* scratch,
                           cudaStream_t stream) = 0;
};

// cuBLAS, on the calling thread's device. Rows of a batch may differ in the last bits
// from the same rows alone. INTERNAL with cuBLAS's word.
absl::StatusOr<std::unique_ptr<DeviceMatmul>> CreateCublasMatmul();

}  // namespace heavywater
