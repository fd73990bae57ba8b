// What a probability adds to the gains.
#pragma once

#include "worker/backend/cuda/device_code.h"

namespace heavywater::cuda {

// Itself, or with `pivotal` above 0 one (2^32) where it is above that.
__device__ __forceinline__ int64_t Gain(double probability, double pivotal) {
  if (pivotal > 0) return probability > pivotal ? int64_t{1} << 32 : 0;
  return ToFixedPoint(probability);
}

}  // namespace heavywater::cuda
