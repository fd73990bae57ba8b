// Which backends an executable runs the conformance suite over.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/backend/backend.h"

namespace heavywater {

// Names of the suite's parameter.
std::vector<std::string> TestBackendNames();
// FAILED_PRECONDITION where the machine lacks it: the test is skipped.
absl::StatusOr<std::unique_ptr<Backend>> CreateTestBackend(const std::string& name);
// What went wrong beside the results while a test ran and its backend lived; empty:
// nothing.
std::string TestBackendComplaint();

}  // namespace heavywater
