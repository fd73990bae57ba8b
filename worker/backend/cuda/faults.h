// Errors that only kernels can see. They need no copy and no host function, so that
// what reports them can be captured as a graph.
#pragma once

#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/cuda/fault.h"

namespace heavywater::cuda {

class Faults {
 public:
  static absl::StatusOr<std::unique_ptr<Faults>> Create();
  ~Faults();
  Faults(const Faults&) = delete;
  Faults& operator=(const Faults&) = delete;

  // Where kernels StoreHost() a Fault.
  Fault* fault() { return fault_; }
  // What a stream that was synchronised left there, once.
  absl::Status Take();

 private:
  Faults() = default;
  Fault* fault_ = nullptr;
};

}  // namespace heavywater::cuda
