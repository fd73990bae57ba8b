// Figures of one sequence summed over the ranks, and how they travel.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/cache/kv_layout.h"
#include "worker/rank/sequence_options.h"

namespace heavywater {

struct SequenceFigures {
  int64_t tokens_demoted = 0;
  int64_t tokens_dropped = 0;
  int64_t device_bytes = 0;
  int64_t device_bytes_peak = 0;  // after the prompt
  int64_t device_bytes_prompt_peak = 0;
  int64_t host_bytes = 0;
  int64_t full_cache_bytes = 0;  // of as many tokens, rounded up to a page
  int64_t recall_queries = 0;
  int64_t recall_reads = 0;
  int64_t recall_reads_max = 0;  // the largest of any rank
  int64_t promoted = 0;
  double mass_missing = 0;  // mean over the ranks
  int64_t sketch_bytes = 0;
};

// How many numbers a rank sends for one sequence.
int64_t NumFigures(int world_size);
// This rank's numbers: added up over ranks they give FiguresFromSums().
std::vector<int64_t> FiguresToSum(const SequenceStats& stats, const KvShape& shape, int rank,
                                  int world_size);
SequenceFigures FiguresFromSums(std::span<const int64_t> sums, int world_size);

}  // namespace heavywater
