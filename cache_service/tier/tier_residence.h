// How long pages stay in a tier before they leave it for another.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>

namespace heavywater {

// Seconds since some time in the past, in what a page's bookkeeping has room for.
inline uint32_t ResidenceClock() {
  return static_cast<uint32_t>(std::chrono::duration_cast<std::chrono::seconds>(
                                   std::chrono::steady_clock::now().time_since_epoch())
                                   .count());
}

// Upper ends of the classes, in seconds; one more has the rest. From a tier that is too small to
// one whose pages stay until their sequences end.
inline constexpr std::array<uint32_t, 9> kResidenceSeconds = {1,    5,    30,    120,   600,
                                                              3600, 7200, 43200, 172800};

struct Residence {
  std::array<int64_t, kResidenceSeconds.size() + 1> pages = {};  // by class
  int64_t seconds = 0;                                           // together

  void Add(uint32_t stayed) {
    const auto end = std::lower_bound(kResidenceSeconds.begin(), kResidenceSeconds.end(), stayed);
    ++pages[static_cast<size_t>(end - kResidenceSeconds.begin())];
    seconds += stayed;
  }
};

// Of those that left for the next tier, and of those that came back to host memory.
struct TierResidence {
  Residence down;
  Residence up;
};

}  // namespace heavywater
