// What a kernel found wrong, in pinned host memory; the next Synchronize() says it.
#pragma once

#include <cstdint>

namespace heavywater::cuda {

enum class FaultKind : int32_t { kNone, kTooManyVictims };

struct alignas(16) Fault {
  FaultKind kind = FaultKind::kNone;
  int32_t set = 0;
  int64_t limit = 0;
};

}  // namespace heavywater::cuda
