// Where there is no CUDA toolkit to build with.
#include "tests/bench/options.h"

namespace heavywater {
namespace {

absl::Status Absent() {
  return absl::FailedPreconditionError("this program was built without CUDA: no --backend cuda");
}

}  // namespace

absl::StatusOr<BenchJson> RunCudaAttentionBench(const BenchOptions&) { return Absent(); }
absl::StatusOr<BenchJson> RunCudaRecallBench(const BenchOptions&) { return Absent(); }
absl::StatusOr<BenchJson> RunCudaStepBench(const BenchOptions&) { return Absent(); }

}  // namespace heavywater
