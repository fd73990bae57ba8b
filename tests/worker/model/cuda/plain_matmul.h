// Stands in for cuBLAS where device memory is the shim's.
#pragma once

#include <memory>

#include "worker/model/cuda/device_matmul.h"

namespace heavywater {

// Queued as a kernel, as cuBLAS does it; sums are in double.
std::unique_ptr<DeviceMatmul> CreatePlainMatmul();

}  // namespace heavywater
