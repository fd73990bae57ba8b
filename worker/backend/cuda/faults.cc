#include "worker/backend/cuda/faults.h"

#include <new>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/backend/cuda/cuda_check.h"

namespace heavywater::cuda {

absl::StatusOr<std::unique_ptr<Faults>> Faults::Create() {
  std::unique_ptr<Faults> faults(new Faults);
  void* memory = nullptr;
  HW_RETURN_IF_CUDA_ERROR(
      cudaHostAlloc(&memory, sizeof(Fault), cudaHostAllocPortable | cudaHostAllocMapped));
  faults->fault_ = new (memory) Fault;
  return faults;
}

Faults::~Faults() { cudaFreeHost(fault_); }

absl::Status Faults::Take() {
  const Fault fault = std::exchange(*fault_, Fault());
  switch (fault.kind) {
    case FaultKind::kNone:
      break;
    case FaultKind::kTooManyVictims:
      return absl::FailedPreconditionError(absl::StrCat(
          "set ", fault.set, " gives up more than max_victims, which is ", fault.limit));
  }
  return absl::OkStatus();
}

}  // namespace heavywater::cuda
