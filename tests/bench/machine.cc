#include "tests/bench/machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "cache_service/base/check.h"

namespace heavywater {
namespace {

constexpr int64_t kAheads[] = {0, 2048, 4096, 8192, 16384};
// Prefetching runs past the end: into memory that exists, so that it costs the same.
constexpr int64_t kMargin = int64_t{2} << 20;
constexpr int kRounds = 5;

volatile uint64_t sink_of_reads = 0;

}  // namespace

void MemoryReader::Unmap::operator()(std::byte* memory) const { munmap(memory, kBytes + kMargin); }

MemoryReader::MemoryReader(CpuTarget target) : kernels_(MachineKernelsOf(target)) {
  void* const memory =
      mmap(nullptr, kBytes + kMargin, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  HW_CHECK(memory != MAP_FAILED);
  buffer_.reset(static_cast<std::byte*>(memory));
  madvise(memory, kBytes + kMargin, MADV_HUGEPAGE);  // a wish: without, it is only slower
  std::memset(memory, 1, kBytes + kMargin);
  double best = 0;
  int64_t best_ahead = 0;
  for (const int64_t ahead : kAheads) {
    ahead_ = ahead;
    const Timed pass = Pass();
    const double speed = 1 / MedianSeconds(kRounds, {&pass, 1})[0];
    if (speed > best) best_ahead = ahead;
    best = std::max(best, speed);
  }
  ahead_ = best_ahead;
}

Timed MemoryReader::Pass() {
  return {
      .prepare = [this] { FlushFromCaches(buffer_.get(), kBytes); },
      .run =
          [this] { sink_of_reads = sink_of_reads + kernels_.read(buffer_.get(), kBytes, ahead_); }};
}

double MeasureMultiplyAdd(CpuTarget target) {
  constexpr int64_t kFmaRounds = 1'000'000;
  double operations = 0;
  const Timed run = {.prepare = [] {},
                     .run =
                         [&] {
                           float sink = 0.5f;
                           operations = MachineKernelsOf(target).multiply_add(kFmaRounds, &sink);
                           HW_CHECK(sink > 0);
                         }};
  const double seconds = MedianSeconds(kRounds, {&run, 1})[0];
  return operations / seconds;
}

}  // namespace heavywater
