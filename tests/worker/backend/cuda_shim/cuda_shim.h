// How tests drive the shim of CUDA's execution model (README.md).
#pragma once

#include <cstdint>
#include <functional>
#include <string>

namespace heavywater::cuda_shim {

// Which threads and blocks run first.
enum class Order { kForward, kReverse, kRandom };
// What memory that nobody wrote holds: all bits set (NaN in every float type, -1 in
// integers), or random bytes.
enum class Poison { kOnes, kRandom };
// When enqueued work runs: at once; not before something waits for it; or at
// random times in between.
enum class Progress { kAtOnce, kLate, kRandom };

// What a kernel was started with.
struct LaunchRecord {
  std::string kernel;  // with its template arguments
  int threads = 0;     // of a block
  int64_t shared_bytes = 0;
};

struct Options {
  Order order = Order::kForward;
  Poison poison = Poison::kOnes;
  Progress progress = Progress::kAtOnce;
  uint64_t seed = 1;
  int num_devices = 1;
  int64_t device_memory_bytes = int64_t{8} << 30;                // of all devices together
  std::function<void(const LaunchRecord&)> on_launch = nullptr;  // may be null
};
// Finishes pending work first.
void SetOptions(const Options& options);
const Options& CurrentOptions();

// Bytes that kernels moved through Load(), Store() and the like since the last reset.
struct Counters {
  int64_t loaded = 0;  // from device memory
  int64_t stored = 0;
  int64_t host_loaded = 0;  // from host memory, over the bus
  int64_t host_stored = 0;
  int64_t launches = 0;
};
Counters ReadCounters();
void ResetCounters();

// What failed in a kernel since the last call, empty when nothing did. A failure is
// sticky, as on a device: until it is taken every call returns an error.
std::string TakeFailure();

// A line when memory beside an allocation was overwritten (also checked at cudaFree),
// else empty.
std::string DamagedGuards();

// Live device allocations.
int64_t AllocatedBytes();

}  // namespace heavywater::cuda_shim
