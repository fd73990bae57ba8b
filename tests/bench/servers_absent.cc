// Builds without servers.
#include "tests/bench/options.h"

namespace heavywater {

absl::StatusOr<BenchJson> RunDecodeBench(const BenchOptions&) {
  return absl::FailedPreconditionError("this build has no servers, and no model beside them");
}
absl::StatusOr<BenchJson> RunCommBench(const BenchOptions& options) {
  return RunDecodeBench(options);
}
absl::StatusOr<BenchJson> RunRpcBench(const BenchOptions& options) {
  return RunDecodeBench(options);
}

}  // namespace heavywater
