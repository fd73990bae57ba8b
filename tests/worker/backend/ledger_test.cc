// Operations on scores: CollectGains, SumRows, AddScores, PoolVotes.
#include <cmath>
#include <limits>

#include "tests/worker/backend/backend_test_base.h"

namespace heavywater {
namespace {

KvShape Shape(int num_kv_heads) {
  KvShape shape;
  shape.num_query_heads = num_kv_heads;
  shape.num_kv_heads = num_kv_heads;
  shape.head_dim = 8;
  shape.dtype = KvDtype::kFloat32;
  return shape;
}

// Capacity 5, of which 3 are used; gains 1, 2, 3, ...
LayerImage LayerWithGains(int num_sets, int num_kv_heads) {
  LayerImage layer = EmptyLayer(Shape(num_kv_heads), num_sets, 5);
  layer.used = 3;
  for (size_t i = 0; i < layer.gains.size(); ++i) layer.gains[i] = static_cast<int64_t>(i + 1);
  return layer;
}

std::vector<int64_t> Collect(Backend& backend, const KvShape& shape, const DeviceLayer& layer) {
  const int64_t count = layer.view().num_sets * layer.view().used;
  const DeviceBuffer to = Upload(backend, std::vector<int64_t>(count, -1));
  Stream stream;
  EXPECT_TRUE(backend.CollectGains(shape, layer.view(), to.As<int64_t>(), stream).ok());
  return Download<int64_t>(backend, to);
}

TEST_P(BackendTest, CollectSumsTheHeadsOfASharedSetAndClearsThem) {
  const DeviceLayer layer(backend(), LayerWithGains(1, 2));
  EXPECT_EQ(Collect(backend(), Shape(2), layer), (std::vector<int64_t>{1 + 6, 2 + 7, 3 + 8}));
  EXPECT_EQ(layer.Read().gains, (std::vector<int64_t>{0, 0, 0, 4, 5, 0, 0, 0, 9, 10}));
  EXPECT_EQ(Collect(backend(), Shape(2), layer), (std::vector<int64_t>{0, 0, 0}));
}

TEST_P(BackendTest, CollectKeepsTheSetsOfKvHeadsApart) {
  const DeviceLayer layer(backend(), LayerWithGains(2, 2));
  EXPECT_EQ(Collect(backend(), Shape(2), layer), (std::vector<int64_t>{1, 2, 3, 6, 7, 8}));
}

std::vector<int64_t> Sums(Backend& backend, const std::vector<int64_t>& rows, int64_t num_rows) {
  const DeviceBuffer from = Upload(backend, rows);
  const DeviceBuffer to = Upload(backend, std::vector<int64_t>(num_rows, 77));
  Stream stream;
  EXPECT_TRUE(backend
                  .SumRows(from.As<int64_t>(), to.As<int64_t>(), num_rows,
                           static_cast<int64_t>(rows.size()) / num_rows, stream)
                  .ok());
  return Download<int64_t>(backend, to);
}

TEST_P(BackendTest, SumRowsAddsEachRowWithoutLosingABit) {
  EXPECT_EQ(Sums(backend(), {1, 2, 3, 4, 5, 6}, 2), (std::vector<int64_t>{6, 15}));
  constexpr int64_t kLarge = (int64_t{1} << 60) + 1;
  EXPECT_EQ(Sums(backend(), {kLarge, 2, 0, kLarge}, 1), (std::vector<int64_t>{2 * kLarge + 2}));
  std::mt19937 rng(5);
  std::vector<int64_t> rows(3 * 2017);
  std::vector<int64_t> want(3, 0);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i] = static_cast<int64_t>(rng());
    want[i / 2017] += rows[i];
  }
  EXPECT_EQ(Sums(backend(), rows, 3), want);
}

TEST_P(BackendTest, SumRowsTellsNegativePartsAndStopsAtTheLargestInteger) {
  constexpr int64_t kMost = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(Sums(backend(), {5, -1, 7, 1, 2, 3}, 2), (std::vector<int64_t>{-1, 6}));
  EXPECT_EQ(Sums(backend(), {kMost, 1, 0, kMost - 3, 3, 0}, 2),
            (std::vector<int64_t>{kMost, kMost}));
  EXPECT_EQ(Sums(backend(), {kMost, kMost, kMost, -kMost - 1}, 1), (std::vector<int64_t>{-1}));
}

std::vector<int64_t> AddTo(Backend& backend, const std::vector<int64_t>& scores,
                           const std::vector<int64_t>& added, double decay) {
  LayerImage image = EmptyLayer(Shape(2), 2, static_cast<int64_t>(scores.size()) / 2);
  image.scores = scores;
  image.used = static_cast<int64_t>(added.size()) / 2;
  const DeviceLayer layer(backend, image);
  const DeviceBuffer from = Upload(backend, added);
  Stream stream;
  EXPECT_TRUE(backend.AddScores(layer.view(), from.As<int64_t>(), decay, stream).ok());
  return layer.Read().scores;
}

TEST_P(BackendTest, AddScoresWithoutDecayChangesNoBit) {
  // Beyond 2^53, where a pass through double would round.
  const int64_t large = (int64_t{1} << 60) + 1;
  EXPECT_EQ(AddTo(backend(), {large, 5, 6, 7}, {2, 3}, 1.0),
            (std::vector<int64_t>{large + 2, 5, 6 + 3, 7}));
}

TEST_P(BackendTest, AddScoresDecaysFirstRoundingHalfToEven) {
  EXPECT_EQ(AddTo(backend(), {1, 3, 5, 101, 1001, 7}, {10, 10, 10, 10, 10, 10}, 0.5),
            (std::vector<int64_t>{10, 12, 12, 60, 510, 14}));
  EXPECT_EQ(AddTo(backend(), {1000000, 0}, {1, 0}, 0.9), (std::vector<int64_t>{900001, 0}));
}

std::vector<int64_t> Pool(Backend& backend, const std::vector<int64_t>& votes, int num_rows,
                          Pooling pooling, int kernel) {
  const DeviceBuffer from = Upload(backend, votes);
  const DeviceBuffer to = Upload(backend, std::vector<int64_t>(votes.size(), -1));
  Stream stream;
  EXPECT_TRUE(backend
                  .PoolVotes(from.As<int64_t>(), to.As<int64_t>(), num_rows,
                             static_cast<int64_t>(votes.size()) / num_rows, pooling, kernel, stream)
                  .ok());
  return Download<int64_t>(backend, to);
}

TEST_P(BackendTest, AveragePoolingSumsTheNeighboursWithinTheRow) {
  EXPECT_EQ(Pool(backend(), {1, 2, 4, 8, 100, 0, 0, 0}, 2, Pooling::kAverage, 3),
            (std::vector<int64_t>{3, 7, 14, 12, 100, 100, 0, 0}));
  EXPECT_EQ(Pool(backend(), {1, 2, 4}, 1, Pooling::kAverage, 7), (std::vector<int64_t>{7, 7, 7}));
}

TEST_P(BackendTest, MaxPoolingTakesTheLargestNeighbour) {
  EXPECT_EQ(Pool(backend(), {5, 1, 2, 9, 0, 0}, 1, Pooling::kMax, 3),
            (std::vector<int64_t>{5, 5, 9, 9, 9, 0}));
}

TEST_P(BackendTest, WithoutPoolingVotesStayAsTheyAre) {
  EXPECT_EQ(Pool(backend(), {5, 1, 2}, 1, Pooling::kNone, 5), (std::vector<int64_t>{5, 1, 2}));
  EXPECT_EQ(Pool(backend(), {5, 1, 2}, 1, Pooling::kAverage, 1), (std::vector<int64_t>{5, 1, 2}));
}

TEST_P(BackendTest, PoolingEqualsTheFormulaOnRandomVotes) {
  for (const int kernel : {5, 7}) {
    for (const Pooling pooling : {Pooling::kAverage, Pooling::kMax}) {
      std::mt19937 rng(kernel);
      std::vector<int64_t> votes(3 * 41);
      for (int64_t& vote : votes) vote = static_cast<int64_t>(rng());
      std::vector<int64_t> expected(votes.size(), 0);
      for (int i = 0; i < 3 * 41; ++i) {
        for (int j = i % 41 - kernel / 2; j <= i % 41 + kernel / 2; ++j) {
          if (j < 0 || j >= 41) continue;
          const int64_t vote = votes[i / 41 * 41 + j];
          expected[i] = pooling == Pooling::kMax ? std::max(expected[i], vote) : expected[i] + vote;
        }
      }
      EXPECT_EQ(Pool(backend(), votes, 3, pooling, kernel), expected);
    }
  }
}

}  // namespace
}  // namespace heavywater
