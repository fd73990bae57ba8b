// The CUDA backend on the host shim: its kernels with their threads in several orders,
// its work at once, late and at random times.
#include <cstdio>
#include <cstdlib>
#include <random>

#include "absl/strings/str_cat.h"
#include "tests/worker/backend/backend_factory.h"
#include "tests/worker/backend/cuda_shim/cuda_shim.h"
#include "worker/backend/cuda/cuda_backend.h"

namespace heavywater {
namespace {

using cuda_shim::Options;
using cuda_shim::Order;
using cuda_shim::Poison;
using cuda_shim::Progress;

// A run's own, unless HEAVYWATER_TEST_SEED says it.
uint64_t Seed() {
  static const uint64_t seed = [] {
    const char* given = std::getenv("HEAVYWATER_TEST_SEED");
    const uint64_t value =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device()();
    std::printf("HEAVYWATER_TEST_SEED=%llu\n", static_cast<unsigned long long>(value));
    return value;
  }();
  return seed;
}

Options OptionsOf(const std::string& name) {
  if (name == "cuda-shim-reverse") return {.order = Order::kReverse, .progress = Progress::kLate};
  if (name == "cuda-shim-random") {
    return {.order = Order::kRandom,
            .poison = Poison::kRandom,
            .progress = Progress::kRandom,
            .seed = Seed()};
  }
  return {};
}

}  // namespace

std::vector<std::string> TestBackendNames() {
  return {"cuda-shim-forward", "cuda-shim-reverse", "cuda-shim-random"};
}

absl::StatusOr<std::unique_ptr<Backend>> CreateTestBackend(const std::string& name) {
  cuda_shim::SetOptions(OptionsOf(name));
  return CreateCudaBackend({.device = 0});
}

std::string TestBackendComplaint() {
  std::string complaint = cuda_shim::TakeFailure();
  if (complaint.empty()) complaint = cuda_shim::DamagedGuards();
  if (complaint.empty() && cuda_shim::AllocatedBytes() != 0) {
    complaint = absl::StrCat(cuda_shim::AllocatedBytes(), " bytes of device memory leaked");
  }
  return complaint;
}

}  // namespace heavywater
