#include "worker/backend/cpu/target.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "hwy/targets.h"

namespace heavywater {
namespace {

bool Supported(CpuTarget target) {
  const int64_t bit = target == CpuTarget::kAvx2 ? HWY_AVX2 : HWY_AVX3;
  return (hwy::SupportedTargets() & bit) != 0;
}

}  // namespace

std::string_view CpuTargetName(CpuTarget target) {
  return target == CpuTarget::kAvx2 ? "avx2" : "avx512";
}

absl::StatusOr<CpuTarget> ChooseCpuTarget(std::string_view name) {
  if (name != "best" && name != "avx2" && name != "avx512") {
    return absl::InvalidArgumentError(absl::StrCat("target is \"", std::string(name),
                                                   "\", want \"best\", \"avx2\" or \"avx512\""));
  }
  for (const CpuTarget target : {CpuTarget::kAvx512, CpuTarget::kAvx2}) {
    if ((name == "best" || name == CpuTargetName(target)) && Supported(target)) return target;
  }
  return absl::FailedPreconditionError(
      absl::StrCat("target is \"", std::string(name), "\", but this machine has ",
                   Supported(CpuTarget::kAvx2) ? "AVX2 only" : "neither AVX2 nor AVX-512"));
}

}  // namespace heavywater
