// The instruction sets that kernels are compiled for. A backend holds its own
// choice: Highway's own dispatch is one per process, and tests and benchmarks
// run both side by side.
#pragma once

#include <string_view>

#include "absl/status/statusor.h"

namespace heavywater {

enum class CpuTarget { kAvx2, kAvx512 };

std::string_view CpuTargetName(CpuTarget target);  // "avx2", "avx512"

// `name`: "best", "avx2" or "avx512". FAILED_PRECONDITION when this machine
// lacks it, INVALID_ARGUMENT for another name.
absl::StatusOr<CpuTarget> ChooseCpuTarget(std::string_view name);

}  // namespace heavywater
