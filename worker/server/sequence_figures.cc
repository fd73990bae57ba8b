#include "worker/server/sequence_figures.h"

#include <algorithm>
#include <cmath>

#include "cache_service/base/check.h"

namespace heavywater {
namespace {

constexpr size_t kSums = 12;
constexpr double kShareUnit = 4294967296.0;  // shares travel as 2^-32 fixed point

}  // namespace

int64_t NumFigures(int world_size) { return static_cast<int64_t>(kSums) + world_size; }

// A largest value cannot be summed: each rank has a place of its own for it.
std::vector<int64_t> FiguresToSum(const SequenceStats& stats, const KvShape& shape, int rank,
                                  int world_size) {
  std::vector<int64_t> numbers = {stats.tokens_demoted,
                                  stats.tokens_dropped,
                                  stats.device_bytes,
                                  stats.peak_device_bytes_after_prompt,
                                  stats.peak_device_bytes,
                                  stats.host_bytes,
                                  FullCacheBytes(shape, stats.tokens_seen),
                                  stats.recall_queries,
                                  stats.recall_reads,
                                  stats.promoted,
                                  std::llround(stats.mass_missing * kShareUnit),
                                  stats.sketch_bytes};
  HW_CHECK(numbers.size() == kSums);
  numbers.resize(static_cast<size_t>(NumFigures(world_size)));
  numbers[kSums + static_cast<size_t>(rank)] = stats.recall_reads_max;
  return numbers;
}

SequenceFigures FiguresFromSums(std::span<const int64_t> sums, int world_size) {
  HW_CHECK(static_cast<int64_t>(sums.size()) == NumFigures(world_size));
  const std::span<const int64_t> largest = sums.subspan(kSums);
  return {.tokens_demoted = sums[0],
          .tokens_dropped = sums[1],
          .device_bytes = sums[2],
          .device_bytes_peak = sums[3],
          .device_bytes_prompt_peak = sums[4],
          .host_bytes = sums[5],
          .full_cache_bytes = sums[6],
          .recall_queries = sums[7],
          .recall_reads = sums[8],
          .recall_reads_max = *std::max_element(largest.begin(), largest.end()),
          .promoted = sums[9],
          .mass_missing = static_cast<double>(sums[10]) / kShareUnit / world_size,
          .sketch_bytes = sums[11]};
}

}  // namespace heavywater
