// What all subcommands of heavywater-bench share.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"

namespace heavywater {

struct BenchOptions {
  // Short contexts and few rounds: shows that it works, not how fast.
  bool quick = false;
  bool cuda = false;    // on a GPU instead of the CPU
  std::string model;    // of benchmarks that run one
  int64_t context = 0;  // `decode`: this one alone; 0: several
  // Odd. Fewer of long contexts: to flush them takes longer than to attend to them.
  int rounds(int64_t context) const { return quick ? 3 : context > 8192 ? 7 : 15; }
};

// Fields in the order of the tables.
using BenchJson = nlohmann::ordered_json;

inline constexpr const char* kBenchTargets[] = {"avx2", "avx512"};

// Null where the machine lacks the target. One thread.
inline std::unique_ptr<Backend> BenchBackend(const char* target) {
  auto backend = CreateCpuBackend({.num_threads = 1, .target = target});
  return backend.ok() ? *std::move(backend) : nullptr;
}

// FAILED_PRECONDITION unless a model is named.
absl::Status CheckHasModel(const BenchOptions& options);

// {"bandwidth_gb_s","fma_gflops","rows":[...]}; INTERNAL when a result is wrong.
absl::StatusOr<BenchJson> RunAttentionBench(const BenchOptions& options);
// {"rows":[...]}; likewise.
absl::StatusOr<BenchJson> RunRecallBench(const BenchOptions& options);
absl::StatusOr<BenchJson> RunGrowthBench(const BenchOptions& options);
absl::StatusOr<BenchJson> RunTierBench(const BenchOptions& options);
// FAILED_PRECONDITION without a model.
absl::StatusOr<BenchJson> RunDecodeBench(const BenchOptions& options);
absl::StatusOr<BenchJson> RunCommBench(const BenchOptions& options);
// Starts heavywater-cache and heavywater-worker, which lie beside this program.
absl::StatusOr<BenchJson> RunRpcBench(const BenchOptions& options);

// Likewise on a GPU, with target "cuda", and what the device is and can do.
// FAILED_PRECONDITION without one, or when built without CUDA.
absl::StatusOr<BenchJson> RunCudaAttentionBench(const BenchOptions& options);
absl::StatusOr<BenchJson> RunCudaRecallBench(const BenchOptions& options);
absl::StatusOr<BenchJson> RunCudaStepBench(const BenchOptions& options);

}  // namespace heavywater
