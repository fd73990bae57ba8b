// What worker/backend/cuda/mma.h does with tensor cores, on the CPU.
#pragma once

#include <bit>
#include <cstdint>

#include "warp_functions.h"

namespace heavywater::cuda_shim {

// A lane's operands.
struct MmaOperands {
  uint32_t a[4];
  uint32_t b[2];
};

inline double MmaElement(uint32_t word, int half) {
  return std::bit_cast<float>(half == 0 ? word << 16 : word & 0xffff0000u);
}

// mma.m16n8k16 of bf16 with fp32 accumulators. Here the products are added exactly and
// rounded once; a device truncates.
inline void MultiplyAdd(const uint32_t (&a)[4], uint32_t b0, uint32_t b1, float (&c)[4]) {
  const Gathered<MmaOperands> lanes = GatherLanes(MmaOperands{{a[0], a[1], a[2], a[3]}, {b0, b1}});
  const int group = running.lane / 4;
  const int member = running.lane % 4;
  double sums[4] = {c[0], c[1], c[2], c[3]};
  for (int source = 0; source < 4; ++source) {
    const MmaOperands left = lanes[group * 4 + source];
    const MmaOperands right[2] = {lanes[member * 8 + source], lanes[member * 8 + 4 + source]};
    for (int half = 0; half < 4; ++half) {  // columns 2 source, + 1, + 8, + 9
      for (int i = 0; i < 4; ++i) {
        sums[i] += MmaElement(left.a[i / 2 + half / 2 * 2], half % 2) *
                   MmaElement(right[i % 2].b[half / 2], half % 2);
      }
    }
  }
  for (int i = 0; i < 4; ++i) c[i] = static_cast<float>(sums[i]);
}

}  // namespace heavywater::cuda_shim
