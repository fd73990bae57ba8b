// The machine's limits for one thread, measured in the same run as what is compared
// with them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tests/bench/machine_kernels.h"
#include "tests/bench/timing.h"

namespace heavywater {

// Reads memory as fast as one thread can: huge pages where the system gives them, and
// the best of a few distances of prefetching, found once.
class MemoryReader {
 public:
  explicit MemoryReader(CpuTarget target);

  int64_t bytes() const { return kBytes; }
  // One cold pass over the buffer.
  Timed Pass();

 private:
  // More than the cores' own caches; flushed, so that a shared cache does not help.
  static constexpr int64_t kBytes = int64_t{64} << 20;
  struct Unmap {
    void operator()(std::byte* memory) const;
  };

  const MachineKernels& kernels_;
  std::unique_ptr<std::byte, Unmap> buffer_;
  int64_t ahead_ = 0;
};

// Operations a second of fused multiply-adds.
double MeasureMultiplyAdd(CpuTarget target);

}  // namespace heavywater
