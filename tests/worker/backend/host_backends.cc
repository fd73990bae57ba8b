#include "tests/worker/backend/backend_factory.h"
#include "worker/backend/backend.h"

namespace heavywater {

std::vector<std::string> TestBackendNames() { return {"reference", "cpu-avx2", "cpu-avx512"}; }

absl::StatusOr<std::unique_ptr<Backend>> CreateTestBackend(const std::string& name) {
  if (name == "reference") return CreateReferenceBackend();
  return CreateCpuBackend({.num_threads = 1, .target = name.substr(sizeof("cpu-") - 1)});
}

std::string TestBackendComplaint() { return ""; }

}  // namespace heavywater
