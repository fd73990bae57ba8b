#include "tests/bench/timing.h"

#include <time.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "hwy/cache_control.h"

namespace heavywater {

double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

void FlushFromCaches(std::span<const std::byte> bytes) {
  constexpr size_t kLine = 64;
  if (bytes.empty()) return;
  for (size_t i = 0; i < bytes.size(); i += kLine) hwy::FlushCacheline(&bytes[i]);
  hwy::FlushCacheline(&bytes.back());
  std::atomic_thread_fence(std::memory_order_seq_cst);  // done when what is timed begins
}

double Median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<int64_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::vector<double> MedianSeconds(int rounds, std::span<const Timed> timed) {
  std::vector<std::vector<double>> seconds(timed.size());
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < timed.size(); ++i) {
      timed[i].prepare();
      const double start = CpuSeconds();
      timed[i].run();
      seconds[i].push_back(CpuSeconds() - start);
    }
  }
  std::vector<double> medians;
  for (std::vector<double>& of_one : seconds) medians.push_back(Median(std::move(of_one)));
  return medians;
}

}  // namespace heavywater
