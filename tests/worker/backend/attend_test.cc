// Backend::Attend.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/worker/backend/backend_test_base.h"

namespace heavywater {
namespace {

constexpr int64_t kOne = int64_t{1} << 32;

KvShape Shape(int num_query_heads, int num_kv_heads, int head_dim, KvDtype dtype) {
  KvShape shape;
  shape.num_query_heads = num_query_heads;
  shape.num_kv_heads = num_kv_heads;
  shape.head_dim = head_dim;
  shape.dtype = dtype;
  return shape;
}

KvShape RandomShape(std::mt19937& rng, int group_size) {
  constexpr int kHeadDims[] = {8, 24, 64, 72, 80, 96, 128, 256};
  const int kv_heads = 1 + static_cast<int>(rng() % 3);
  return Shape(kv_heads * group_size, kv_heads, kHeadDims[rng() % std::size(kHeadDims)],
               kKvDtypes[rng() % 3]);
}

TEST_P(BackendTest, AttendEqualsTheOracleOverRandomShapes) {
  for (unsigned seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const KvShape shape = RandomShape(rng, 1 + static_cast<int>(seed % 12));
    const AttendCase attend = RandomAttendCase(rng, shape, 1 + static_cast<int>(rng() % 3));
    ExpectClose(RunAttend(backend(), attend), RunAttend(oracle(), attend),
                attend.num_tokens() * shape.group_size());
    if (HasFatalFailure()) return;
  }
}

// More query heads for each KV head than a kernel takes at once, and just as many.
TEST_P(BackendTest, AttendOfLargeGroupsEqualsTheOracle) {
  struct Case {
    int group_size;
    int head_dim;
  };
  for (const auto [group_size, head_dim] :
       {Case{16, 64}, Case{16, 128}, Case{17, 80}, Case{40, 64}, Case{8, 256}, Case{13, 256}}) {
    SCOPED_TRACE("group " + std::to_string(group_size) + " of " + std::to_string(head_dim));
    std::mt19937 rng(group_size);
    const KvShape shape = Shape(2 * group_size, 2, head_dim, kKvDtypes[group_size % 3]);
    const AttendCase attend = RandomAttendCase(rng, shape, 2);
    ExpectClose(RunAttend(backend(), attend), RunAttend(oracle(), attend),
                attend.num_tokens() * group_size);
  }
}

TEST_P(BackendTest, AttendOfARaggedBatchEqualsEachSequenceAloneBitForBit) {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const KvShape shape = RandomShape(rng, 1 + static_cast<int>(rng() % 8));
    const AttendCase batch = RandomAttendCase(rng, shape, 5);
    const AttendOutcome together = RunAttend(backend(), batch);
    std::vector<float> alone_out;
    for (size_t item = 0; item < batch.items.size(); ++item) {
      const AttendOutcome alone = RunAttend(backend(), batch.Alone(item));
      alone_out.insert(alone_out.end(), alone.out.begin(), alone.out.end());
      EXPECT_EQ(together.gains[item], alone.gains[0]) << "item " << item;
    }
    ExpectSameBits(together.out, alone_out);
  }
}

TEST_P(BackendTest, AttendOfSeveralTokensEqualsOneTokenAtATimeBitForBit) {
  std::mt19937 rng(3);
  const KvShape shape = Shape(6, 2, 64, KvDtype::kBFloat16);
  AttendCase chunk{.shape = shape, .items = {}, .queries = {}, .scale = 0.125f};
  chunk.items.push_back({.layer = DenseLayer(rng, shape, 1, 600)});
  chunk.items[0].num_tokens = 44;
  chunk.items[0].first_position = 550;
  chunk.queries = RandomFloats(rng, 44 * 6 * 64);
  const AttendOutcome together = RunAttend(backend(), chunk);
  std::vector<float> out;
  std::vector<int64_t> gains(chunk.items[0].layer.gains.size(), 0);
  for (int token = 0; token < 44; ++token) {
    AttendCase one{.shape = shape, .items = chunk.items, .queries = {}, .scale = chunk.scale};
    one.items[0].num_tokens = 1;
    one.items[0].first_position = 550 + token;
    one.queries.assign(chunk.queries.begin() + token * 6 * 64,
                       chunk.queries.begin() + (token + 1) * 6 * 64);
    const AttendOutcome alone = RunAttend(backend(), one);
    out.insert(out.end(), alone.out.begin(), alone.out.end());
    for (size_t i = 0; i < gains.size(); ++i) gains[i] += alone.gains[0][i];
  }
  ExpectSameBits(together.out, out);
  EXPECT_EQ(together.gains[0], gains);
}

TEST_P(BackendTest, GainsOfAQueryAddUpToOnePerQueryHead) {
  for (const KvDtype dtype : kKvDtypes) {
    for (const int64_t length : {1, 300, 1500}) {
      std::mt19937 rng(length);
      const KvShape shape = Shape(8, 2, 64, dtype);
      AttendCase attend{.shape = shape, .items = {}, .queries = {}, .scale = 0.125f};
      attend.items.push_back({.layer = DenseLayer(rng, shape, 1, length)});
      attend.items[0].first_position = static_cast<Position>(length - 1);
      attend.queries = RandomFloats(rng, 8 * 64, 3);
      const std::vector<int64_t> gains = RunAttend(backend(), attend).gains[0];
      for (int kv_head = 0; kv_head < 2; ++kv_head) {
        const auto first = gains.begin() + kv_head * length;
        const int64_t sum = std::accumulate(first, first + length, int64_t{0});
        EXPECT_NEAR(sum, 4 * kOne, 4 * (length / 2 + 1));
      }
    }
  }
}

TEST_P(BackendTest, EveryQueryHeadReadsTheKvHeadOfItsGroup) {
  // 8 query heads over 2 KV heads; V is the number of its KV head, and each KV
  // head's keys answer one slot only.
  const KvShape shape = Shape(8, 2, 16, KvDtype::kFloat32);
  LayerImage layer = EmptyLayer(shape, 1, 64);
  std::vector<float> keys(2 * 64 * 16, 0.0f);
  std::vector<float> values(2 * 64 * 16, 1.0f);
  std::fill(values.begin() + 64 * 16, values.end(), 2.0f);
  keys[(0 * 64 + 5) * 16] = 100;
  keys[(1 * 64 + 9) * 16] = 100;
  layer.keys = Stored(keys, shape.dtype);
  layer.values = Stored(values, shape.dtype);
  std::iota(layer.positions.begin(), layer.positions.end(), 0);
  AttendCase attend{.shape = shape, .items = {}, .queries = {}, .scale = 1};
  attend.items.push_back({.layer = layer, .num_tokens = 1, .first_position = 63});
  attend.queries.assign(8 * 16, 1.0f);
  const AttendOutcome outcome = RunAttend(backend(), attend);
  for (int head = 0; head < 8; ++head) {
    EXPECT_NEAR(outcome.out[head * 16], head < 4 ? 1 : 2, 1e-6) << "head " << head;
  }
  EXPECT_EQ(outcome.gains[0][5], 4 * kOne);
  EXPECT_EQ(outcome.gains[0][64 + 9], 4 * kOne);
  EXPECT_EQ(outcome.gains[0][9], 0);
}

TEST_P(BackendTest, EqualLogitsGiveEqualGainsToEverySlotThatIsSeen) {
  const KvShape shape = Shape(3, 1, 64, KvDtype::kFloat32);
  LayerImage layer = EmptyLayer(shape, 1, 600);
  for (int slot = 0; slot < 600; ++slot) layer.positions[slot] = slot % 4 == 3 ? -1 : slot;
  AttendCase attend{.shape = shape, .items = {}, .queries = {}, .scale = 0.125f};
  attend.items.push_back({.layer = layer, .num_tokens = 1, .first_position = 400});
  std::mt19937 rng(1);
  attend.queries = RandomFloats(rng, 3 * 64);
  const std::vector<int64_t> gains = RunAttend(backend(), attend).gains[0];
  const int64_t seen = 301;  // of positions 0 .. 400, those with position % 4 != 3
  for (int slot = 0; slot < 600; ++slot) {
    const bool visible = slot <= 400 && slot % 4 != 3;
    EXPECT_EQ(gains[slot], visible ? 3 * std::llrint(static_cast<double>(kOne) / seen) : 0) << slot;
  }
}

TEST_P(BackendTest, FreeSlotsGetNothingAndGiveNothing) {
  std::mt19937 rng(11);
  const KvShape shape = Shape(4, 2, 80, KvDtype::kBFloat16);
  AttendCase attend{.shape = shape, .items = {}, .queries = {}, .scale = 0.1f};
  attend.items.push_back({.layer = DenseLayer(rng, shape, 2, 530)});
  attend.items[0].first_position = 529;
  attend.queries = RandomFloats(rng, 4 * 80);
  LayerImage& layer = attend.items[0].layer;
  AttendCase zeroed = attend;  // the same with zeros where `attend` has huge values
  PunchHoles(rng, shape, 0.5, layer);
  zeroed.items[0].layer.positions = layer.positions;
  const AttendOutcome outcome = RunAttend(backend(), attend);
  ExpectSameBits(outcome.out, RunAttend(backend(), zeroed).out);
  for (size_t i = 0; i < layer.positions.size(); ++i) {
    if (layer.positions[i] == kNoPosition) {
      ASSERT_EQ(outcome.gains[0][i], 0) << "slot " << i;
    }
  }
}

TEST_P(BackendTest, AQueryThatSeesNoSlotYieldsZeros) {
  const KvShape shape = Shape(2, 1, 64, KvDtype::kFloat32);
  for (const int64_t used : {0, 20}) {
    AttendCase attend{.shape = shape, .items = {}, .queries = {}, .scale = 1};
    attend.items.push_back({.layer = EmptyLayer(shape, 1, 20)});
    attend.items[0].layer.used = used;
    attend.queries.assign(2 * 64, 1.0f);
    const AttendOutcome outcome = RunAttend(backend(), attend);
    EXPECT_EQ(outcome.out, std::vector<float>(2 * 64, 0.0f));
    EXPECT_EQ(outcome.gains[0], std::vector<int64_t>(20, 0));
  }
}

TEST_P(BackendTest, GainsStayAsTheyAreWhenNotAskedFor) {
  std::mt19937 rng(5);
  const KvShape shape = Shape(2, 1, 64, KvDtype::kFloat32);
  const DeviceLayer layer(backend(), DenseLayer(rng, shape, 1, 50));
  const DeviceBuffer queries = Upload(backend(), RandomFloats(rng, 2 * 64));
  const DeviceBuffer out = Upload(backend(), std::vector<float>(2 * 64));
  const AttendItem item{.layer = layer.view(),
                        .first_token = 0,
                        .num_tokens = 1,
                        .first_position = 49,
                        .accumulate_gains = false};
  const DeviceBuffer scratch = AttendScratch(backend(), shape, {&item, 1});
  Stream stream;
  ASSERT_TRUE(backend()
                  .Attend(shape,
                          {.items = {&item, 1},
                           .queries = queries.As<float>(),
                           .out = out.As<float>(),
                           .scratch = scratch.As<std::byte>(),
                           .scale = 1},
                          stream)
                  .ok());
  EXPECT_EQ(layer.Read().gains, std::vector<int64_t>(50, 0));
}

TEST_P(BackendTest, AHeadSizeThatIsNoMultipleOfEightIsInvalid) {
  Stream stream;
  const absl::Status status = backend().Attend(Shape(2, 1, 60, KvDtype::kFloat32), {}, stream);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("head_dim is 60"), std::string::npos) << status;
  EXPECT_EQ(backend().CheckShape(Shape(2, 1, 60, KvDtype::kFloat32)), status);
  EXPECT_TRUE(backend().CheckShape(Shape(2, 1, 64, KvDtype::kFloat32)).ok());
}

}  // namespace
}  // namespace heavywater
