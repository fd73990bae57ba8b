// Operations that move KV between slots: Append, GatherSlots, ReleaseSlots.
#include <algorithm>
#include <iterator>
#include <numeric>

#include "tests/worker/backend/backend_test_base.h"

namespace heavywater {
namespace {

KvShape Shape(int num_kv_heads, int head_dim, KvDtype dtype) {
  KvShape shape;
  shape.num_query_heads = num_kv_heads;
  shape.num_kv_heads = num_kv_heads;
  shape.head_dim = head_dim;
  shape.dtype = dtype;
  return shape;
}

// A layer whose scores and gains are not zero, so that zeroing shows.
LayerImage MarkedLayer(std::mt19937& rng, const KvShape& shape, int num_sets, int64_t capacity) {
  LayerImage layer = DenseLayer(rng, shape, num_sets, capacity);
  std::fill(layer.scores.begin(), layer.scores.end(), 7);
  std::fill(layer.gains.begin(), layer.gains.end(), 9);
  return layer;
}

std::vector<std::byte> RowOfToken(const std::vector<float>& rows, const KvShape& shape,
                                  int64_t token, int kv_head) {
  const size_t first = (token * shape.num_kv_heads + kv_head) * shape.head_dim;
  return Stored({rows.data() + first, static_cast<size_t>(shape.head_dim)}, shape.dtype);
}

class AppendedTokens {
 public:
  AppendedTokens(std::mt19937& rng, const KvShape& shape, int64_t tokens)
      : keys(RandomFloats(rng, tokens * shape.num_kv_heads * shape.head_dim)),
        values(RandomFloats(rng, tokens * shape.num_kv_heads * shape.head_dim)) {}
  std::vector<float> keys;
  std::vector<float> values;
};

TEST_P(BackendTest, AppendStoresTheRowsInTheirSlotsAndNothingElse) {
  for (const KvDtype dtype : kKvDtypes) {
    for (const int num_sets : {1, 2}) {
      std::mt19937 rng(num_sets);
      const KvShape shape = Shape(2, 72, dtype);
      LayerImage expected = MarkedLayer(rng, shape, num_sets, 10);
      const AppendedTokens tokens(rng, shape, 4);
      const DeviceLayer layer(backend(), expected);
      const std::vector<int32_t> slots =
          num_sets == 1 ? std::vector<int32_t>{8, 0, 3} : std::vector<int32_t>{8, 0, 3, 1, 9, 2};
      // The sequence's tokens are the batch's rows 1 to 3.
      const AppendItem item{.layer = layer.view(),
                            .first_token = 1,
                            .num_tokens = 3,
                            .first_position = 40,
                            .slots = slots};
      const DeviceBuffer keys = Upload(backend(), tokens.keys);
      const DeviceBuffer values = Upload(backend(), tokens.values);
      Stream stream;
      ASSERT_TRUE(backend()
                      .Append(shape,
                              {.items = {&item, 1},
                               .keys = keys.As<float>(),
                               .values = values.As<float>(),
                               .host_rows = {}},
                              stream)
                      .ok());
      for (int kv_head = 0; kv_head < 2; ++kv_head) {
        const int set = num_sets == 1 ? 0 : kv_head;
        for (int token = 0; token < 3; ++token) {
          const int64_t slot = slots[set * 3 + token];
          const auto key = RowOfToken(tokens.keys, shape, 1 + token, kv_head);
          const auto value = RowOfToken(tokens.values, shape, 1 + token, kv_head);
          const int64_t row = (kv_head * 10 + slot) * static_cast<int64_t>(key.size());
          std::copy(key.begin(), key.end(), expected.keys.begin() + row);
          std::copy(value.begin(), value.end(), expected.values.begin() + row);
          expected.positions[set * 10 + slot] = 40 + token;
          expected.scores[set * 10 + slot] = 0;
          expected.gains[kv_head * 10 + slot] = 0;
        }
      }
      EXPECT_EQ(layer.Read(), expected);
    }
  }
}

TEST_P(BackendTest, TheBytesWrittenThroughAreTheBytesStored) {
  for (const KvDtype dtype : kKvDtypes) {
    std::mt19937 rng(4);
    const KvShape shape = Shape(3, 64, dtype);
    const DeviceLayer layer(backend(), EmptyLayer(shape, 1, 5));
    const AppendedTokens tokens(rng, shape, 2);
    const std::vector<int32_t> slots = {4, 1};
    TestMemory host(backend(), 2 * 3 * shape.row_bytes(), std::byte{0xee});
    std::vector<HostRow> rows(2 * 3);
    for (size_t i = 0; i < rows.size(); ++i) rows[i].row = host.data() + i * shape.row_bytes();
    rows[1].row = nullptr;  // KV head 1 of token 0: another rank writes it
    const AppendItem item{.layer = layer.view(),
                          .first_token = 0,
                          .num_tokens = 2,
                          .first_position = 0,
                          .slots = slots};
    const DeviceBuffer keys = Upload(backend(), tokens.keys);
    const DeviceBuffer values = Upload(backend(), tokens.values);
    Stream stream;
    ASSERT_TRUE(backend()
                    .Append(shape,
                            {.items = {&item, 1},
                             .keys = keys.As<float>(),
                             .values = values.As<float>(),
                             .host_rows = rows},
                            stream)
                    .ok());
    ASSERT_TRUE(backend().Synchronize(stream).ok());
    const LayerImage stored = layer.Read();
    for (int row = 0; row < 6; ++row) {
      std::vector<std::byte> expected(shape.row_bytes(), std::byte{0xee});
      if (row != 1) {
        expected = StoredRow(stored.keys, shape, 5, row % 3, slots[row / 3]);
        const auto value = StoredRow(stored.values, shape, 5, row % 3, slots[row / 3]);
        expected.insert(expected.end(), value.begin(), value.end());
      }
      const std::byte* first = host.data() + row * shape.row_bytes();
      EXPECT_EQ(std::vector(first, first + shape.row_bytes()), expected) << "row " << row;
    }
  }
}

TEST_P(BackendTest, GatherMovesTheKeptRowsAndFreesTheOtherSlots) {
  for (const int num_sets : {1, 2}) {
    std::mt19937 rng(6);
    const KvShape shape = Shape(2, 64, KvDtype::kBFloat16);
    const LayerImage prompt = DenseLayer(rng, shape, 1, 50);
    const DeviceLayer from(backend(), prompt);
    const DeviceLayer to(backend(), MarkedLayer(rng, shape, num_sets, 12));
    const std::vector<Position> kept = num_sets == 1
                                           ? std::vector<Position>{0, 7, 8, 49}
                                           : std::vector<Position>{0, 7, 8, 49, 1, 2, 30, 48};
    std::vector<int64_t> seeds(num_sets * 50);
    for (size_t i = 0; i < seeds.size(); ++i) seeds[i] = 1000 + static_cast<int64_t>(i);
    const DeviceBuffer seed_buffer = Upload(backend(), seeds);
    for (const bool seeded : {true, false}) {
      Stream stream;
      ASSERT_TRUE(backend()
                      .GatherSlots(shape, from.view(), to.view(), kept, 4,
                                   seeded ? seed_buffer.As<int64_t>() : DeviceSpan<int64_t>(), 50,
                                   stream)
                      .ok());
      const LayerImage result = to.Read();
      EXPECT_EQ(result.gains, std::vector<int64_t>(24, 0));
      for (int set = 0; set < num_sets; ++set) {
        for (int slot = 0; slot < 12; ++slot) {
          const Position position = slot < 4 ? kept[set * 4 + slot] : kNoPosition;
          EXPECT_EQ(result.positions[set * 12 + slot], position);
          EXPECT_EQ(result.scores[set * 12 + slot],
                    seeded && slot < 4 ? seeds[set * 50 + position] : 0);
        }
      }
      for (int kv_head = 0; kv_head < 2; ++kv_head) {
        for (int slot = 0; slot < 4; ++slot) {
          const Position position = kept[(num_sets == 1 ? 0 : kv_head) * 4 + slot];
          EXPECT_EQ(StoredRow(result.keys, shape, 12, kv_head, slot),
                    StoredRow(prompt.keys, shape, 50, kv_head, position));
          EXPECT_EQ(StoredRow(result.values, shape, 12, kv_head, slot),
                    StoredRow(prompt.values, shape, 50, kv_head, position));
        }
      }
    }
  }
}

TEST_P(BackendTest, GatherWithinALayerEqualsAGatherIntoAnother) {
  for (const int num_sets : {1, 2}) {
    std::mt19937 rng(7 + num_sets);
    const KvShape shape = Shape(2, 80, KvDtype::kBFloat16);
    constexpr int64_t kSlots = 700;
    constexpr int64_t kKept = 400;
    const LayerImage prompt = DenseLayer(rng, shape, num_sets, kSlots);
    std::vector<Position> kept;
    for (int set = 0; set < num_sets; ++set) {
      std::vector<Position> all(kSlots);
      std::iota(all.begin(), all.end(), 0);
      std::sample(all.begin(), all.end(), std::back_inserter(kept), kKept, rng);
    }
    const DeviceLayer from(backend(), prompt);
    const DeviceLayer to(backend(), prompt);
    const DeviceLayer same(backend(), prompt);
    Stream stream;
    ASSERT_TRUE(
        backend().GatherSlots(shape, from.view(), to.view(), kept, kKept, {}, 0, stream).ok());
    ASSERT_TRUE(
        backend().GatherSlots(shape, same.view(), same.view(), kept, kKept, {}, 0, stream).ok());
    const LayerImage expected = to.Read();
    const LayerImage actual = same.Read();
    EXPECT_EQ(actual.positions, expected.positions);
    for (int kv_head = 0; kv_head < 2; ++kv_head) {
      for (int64_t slot = 0; slot < kKept; ++slot) {
        ASSERT_EQ(StoredRow(actual.keys, shape, kSlots, kv_head, slot),
                  StoredRow(expected.keys, shape, kSlots, kv_head, slot));
        ASSERT_EQ(StoredRow(actual.values, shape, kSlots, kv_head, slot),
                  StoredRow(expected.values, shape, kSlots, kv_head, slot));
      }
    }
  }
}

TEST_P(BackendTest, ListsOfAnyLengthAreAppendedGatheredAndReleased) {
  std::mt19937 rng(9);
  const KvShape shape = Shape(1, 8, KvDtype::kBFloat16);
  constexpr int64_t kTokens = 150000;
  const DeviceLayer layer(backend(), EmptyLayer(shape, 1, kTokens));
  const AppendedTokens tokens(rng, shape, kTokens);
  std::vector<int32_t> slots(kTokens);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), rng);
  const AppendItem item{.layer = layer.view(),
                        .first_token = 0,
                        .num_tokens = kTokens,
                        .first_position = 0,
                        .slots = slots};
  const DeviceBuffer keys = Upload(backend(), tokens.keys);
  const DeviceBuffer values = Upload(backend(), tokens.values);
  TestMemory host(backend(), kTokens * shape.row_bytes());
  std::vector<HostRow> rows(kTokens);
  for (int64_t i = 0; i < kTokens; ++i) rows[i].row = host.data() + i * shape.row_bytes();
  Stream stream;
  ASSERT_TRUE(backend()
                  .Append(shape,
                          {.items = {&item, 1},
                           .keys = keys.As<float>(),
                           .values = values.As<float>(),
                           .host_rows = rows},
                          stream)
                  .ok());
  // By position again.
  const DeviceLayer gathered(backend(), EmptyLayer(shape, 1, kTokens));
  ASSERT_TRUE(backend()
                  .GatherSlots(shape, layer.view(), gathered.view(), slots, kTokens, {}, 0, stream)
                  .ok());
  std::vector<int32_t> odd;
  for (int32_t slot = 1; slot < kTokens; slot += 2) odd.push_back(slot);
  ASSERT_TRUE(backend().ReleaseSlots(shape, gathered.view(), 0, odd, stream).ok());
  const LayerImage read = gathered.Read();
  EXPECT_EQ(read.keys, Stored(tokens.keys, shape.dtype));
  EXPECT_EQ(read.values, Stored(tokens.values, shape.dtype));
  for (int64_t token : {int64_t{0}, int64_t{77777}, kTokens - 1}) {
    const auto stored = RowOfToken(tokens.keys, shape, token, 0);
    const std::byte* row = host.data() + token * shape.row_bytes();
    EXPECT_EQ(std::vector<std::byte>(row, row + stored.size()), stored) << "token " << token;
  }
  for (int64_t slot = 0; slot < kTokens; ++slot) {
    ASSERT_EQ(read.positions[slot], slot % 2 == 1 ? kNoPosition : slots[slot]);
  }
}

TEST_P(BackendTest, ReleaseFreesTheSlotsOfOneSetOnly) {
  std::mt19937 rng(8);
  const KvShape shape = Shape(2, 64, KvDtype::kFloat32);
  LayerImage expected = MarkedLayer(rng, shape, 2, 6);
  const DeviceLayer layer(backend(), expected);
  const std::vector<int32_t> slots = {5, 0};
  Stream stream;
  ASSERT_TRUE(backend().ReleaseSlots(shape, layer.view(), 1, slots, stream).ok());
  for (const int32_t slot : slots) {
    expected.positions[6 + slot] = kNoPosition;
    expected.scores[6 + slot] = 0;
    expected.gains[6 + slot] = 0;
  }
  EXPECT_EQ(layer.Read(), expected);
}

TEST_P(BackendTest, ReleaseInASharedSetZeroesTheGainsOfEveryKvHead) {
  std::mt19937 rng(8);
  const KvShape shape = Shape(3, 64, KvDtype::kFloat32);
  const DeviceLayer layer(backend(), MarkedLayer(rng, shape, 1, 4));
  const std::vector<int32_t> slots = {2};
  Stream stream;
  ASSERT_TRUE(backend().ReleaseSlots(shape, layer.view(), 0, slots, stream).ok());
  EXPECT_EQ(layer.Read().gains, (std::vector<int64_t>{9, 9, 0, 9, 9, 9, 0, 9, 9, 9, 0, 9}));
}

}  // namespace
}  // namespace heavywater
