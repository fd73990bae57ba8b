// Builds without servers.
#include "tests/bench/options.h"
#include "tests/bench/stream_case.h"

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

absl::StatusOr<std::unique_ptr<StreamCase>> MakeServiceStream(int64_t, int) {
  return std::unique_ptr<StreamCase>();
}
absl::StatusOr<std::unique_ptr<StreamCase>> MakeBareStream(int64_t, int) {
  return std::unique_ptr<StreamCase>();
}

}  // namespace heavywater
