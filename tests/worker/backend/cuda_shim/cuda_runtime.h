// Stands for CUDA's header of this name in targets that link heavywater_cuda_shim.
#pragma once

#define __host__
#define __device__
#define __global__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) alignas(bytes)

#include "device_math.h"
#include "runtime_api.h"
#include "vector_types.h"
#include "warp_functions.h"
