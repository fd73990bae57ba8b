// What the machine can do at most: reading memory, multiplying and adding.
#pragma once

#include <cstddef>
#include <cstdint>

#include "worker/backend/cpu/target.h"

namespace heavywater {

struct MachineKernels {
  // Reads `bytes` (a multiple of 1024) once; lines are fetched `ahead` bytes before
  // their turn, 0: by the hardware alone. Returns something that depends on all.
  uint64_t (*read)(const std::byte* from, int64_t bytes, int64_t ahead);
  // Fused multiply-adds in registers; returns how many operations that were (two
  // each). The result goes to `sink`, so that none is left out.
  double (*multiply_add)(int64_t rounds, float* sink);
};

const MachineKernels& MachineKernelsOf(CpuTarget target);

}  // namespace heavywater
