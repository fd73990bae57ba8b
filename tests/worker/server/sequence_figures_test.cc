#include "worker/server/sequence_figures.h"

#include "gtest/gtest.h"

namespace heavywater {
namespace {

KvShape Shape() {
  KvShape shape;
  shape.num_layers = 2;
  shape.num_kv_heads = 1;
  shape.total_kv_heads = 3;
  shape.head_dim = 8;
  shape.page_tokens = 16;
  return shape;
}

SequenceStats StatsOfRank(int rank) {
  SequenceStats stats;
  stats.tokens_seen = 17;
  stats.tokens_demoted = 1 + rank;
  stats.tokens_dropped = 10 + rank;
  stats.device_bytes = 100 + rank;
  stats.peak_device_bytes_after_prompt = 1000 + rank;
  stats.peak_device_bytes = 10000 + rank;
  stats.host_bytes = 100000 + rank;
  stats.recall_queries = 4;
  stats.recall_reads = 20 + rank;
  stats.recall_reads_max = rank == 1 ? 9 : 5;
  stats.promoted = 7;
  stats.mass_missing = 0.25 * (rank + 1);
  stats.sketch_bytes = 64;
  return stats;
}

TEST(SequenceFiguresTest, SumsMeansAndTheLargestComeOutOfOneSum) {
  constexpr int kRanks = 3;
  std::vector<int64_t> sums(static_cast<size_t>(NumFigures(kRanks)));
  for (int rank = 0; rank < kRanks; ++rank) {
    const std::vector<int64_t> numbers = FiguresToSum(StatsOfRank(rank), Shape(), rank, kRanks);
    ASSERT_EQ(numbers.size(), sums.size());
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += numbers[i];
  }
  const SequenceFigures figures = FiguresFromSums(sums, kRanks);
  EXPECT_EQ(figures.tokens_demoted, 6);
  EXPECT_EQ(figures.tokens_dropped, 33);
  EXPECT_EQ(figures.device_bytes, 303);
  EXPECT_EQ(figures.device_bytes_peak, 3003);
  EXPECT_EQ(figures.device_bytes_prompt_peak, 30003);
  EXPECT_EQ(figures.host_bytes, 300003);
  // 17 tokens are two pages of 16.
  EXPECT_EQ(figures.full_cache_bytes, 3 * 32 * Shape().row_bytes() * 2);
  EXPECT_EQ(figures.recall_queries, 12);
  EXPECT_EQ(figures.recall_reads, 63);
  EXPECT_EQ(figures.recall_reads_max, 9);
  EXPECT_EQ(figures.promoted, 21);
  EXPECT_DOUBLE_EQ(figures.mass_missing, 0.5);
  EXPECT_EQ(figures.sketch_bytes, 192);
}

}  // namespace
}  // namespace heavywater
