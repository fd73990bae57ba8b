// Time of one thread, with caches cold, medians.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace heavywater {

// CPU time of this thread, so that what else runs on the machine counts less.
double CpuSeconds();

// Out of every cache. The benchmarks' "device" is this machine's memory.
void FlushFromCaches(std::span<const std::byte> bytes);
template <typename T>
void FlushFromCaches(const T* data, int64_t count) {
  FlushFromCaches(std::as_bytes(std::span<const T>(data, static_cast<size_t>(count))));
}

// The middle one of an odd number.
double Median(std::vector<double> values);

struct Timed {
  std::function<void()> prepare;  // not timed
  std::function<void()> run;
};

// Median seconds of each. They take turns, `rounds` times, so that what disturbs the
// machine meanwhile disturbs all of them: ratios stay ratios.
std::vector<double> MedianSeconds(int rounds, std::span<const Timed> timed);

}  // namespace heavywater
