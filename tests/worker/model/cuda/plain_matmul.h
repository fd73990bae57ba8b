// Stands in for cuBLAS where device memory is the shim's.
#pragma once

#include <memory>

#include "worker/model/cuda/device_matmul.h"

namespace heavywater {

// Waits for the stream, then multiplies on the host, summed in double.
std::unique_ptr<DeviceMatmul> CreatePlainMatmul();

}  // namespace heavywater
