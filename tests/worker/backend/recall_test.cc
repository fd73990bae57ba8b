// Backend::Attend with recall.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>

#include "cache_service/base/float16.h"
#include "tests/worker/backend/backend_test_base.h"
#include "worker/backend/reference/recall_oracle.h"
#include "worker/backend/sketch.h"
#include "worker/cache/kv_element.h"

namespace heavywater {
namespace {

constexpr int64_t kOne = int64_t{1} << 32;

KvShape Shape(int num_query_heads, int num_kv_heads, int head_dim, KvDtype dtype,
              int page_tokens = 64) {
  KvShape shape;
  shape.num_query_heads = num_query_heads;
  shape.num_kv_heads = num_kv_heads;
  shape.head_dim = head_dim;
  shape.dtype = dtype;
  shape.page_tokens = page_tokens;
  return shape;
}

KvShape RandomShape(std::mt19937& rng, int group_size) {
  constexpr int kHeadDims[] = {64, 80, 96, 128, 256};
  constexpr int kPageTokens[] = {16, 64, 256};
  const int kv_heads = 1 + static_cast<int>(rng() % 3);
  return Shape(kv_heads * group_size, kv_heads, kHeadDims[rng() % std::size(kHeadDims)],
               kKvDtypes[rng() % 3], kPageTokens[rng() % 3]);
}

std::vector<float> KeysOfLayer(std::mt19937& rng, const KvShape& shape, int64_t positions) {
  std::vector<float> keys;
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    const std::vector<float> of_head = StructuredKeys(rng, positions, shape.head_dim);
    keys.insert(keys.end(), of_head.begin(), of_head.end());
  }
  return keys;
}

// A sequence of `num_positions` of which slot i holds position i or nothing, and
// what is in no slot is demoted. The last `num_tokens` are resident.
AttendCase::Item Demoted(std::mt19937& rng, const KvShape& shape, int num_sets,
                         int64_t num_positions, int64_t num_tokens, double fraction) {
  LayerImage full = DenseLayer(rng, shape, num_sets, num_positions);
  full.keys = Stored(KeysOfLayer(rng, shape, num_positions), shape.dtype);
  AttendCase::Item item{.layer = full, .num_tokens = num_tokens};
  item.first_position = static_cast<Position>(num_positions - num_tokens);
  item.recall = RecallOf(shape, full, DefaultSketchChannels(shape.head_dim));
  const std::vector<std::byte> huge =
      Stored(std::vector<float>(shape.head_dim, 1e30f), shape.dtype);
  for (int set = 0; set < num_sets; ++set) {
    for (Position position = 0; position < item.first_position; ++position) {
      if (!std::bernoulli_distribution(fraction)(rng)) continue;
      SetDemoted(*item.recall, set, position, true);
      item.layer.positions[set * num_positions + position] = kNoPosition;
      for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
        if (num_sets > 1 && kv_head != set) continue;
        const int64_t row =
            (kv_head * num_positions + position) * static_cast<int64_t>(huge.size());
        std::copy(huge.begin(), huge.end(), item.layer.keys.begin() + row);
        std::copy(huge.begin(), huge.end(), item.layer.values.begin() + row);
      }
    }
  }
  return item;
}

AttendCase::Item RandomItem(std::mt19937& rng, const KvShape& shape) {
  constexpr int64_t kLengths[] = {2, 17, 64, 65, 200, 256, 257, 600};
  constexpr double kFractions[] = {0.0, 0.2, 0.8, 1.0};
  constexpr int64_t kMaxPicks[] = {1, 5, 64, 1000};
  constexpr float kMinShares[] = {1e-4f, 1e-2f, 0.0f};
  const int num_sets = rng() % 2 == 0 ? 1 : shape.num_kv_heads;
  const int64_t tokens = rng() % 3 == 0 ? 1 + static_cast<int64_t>(rng() % 5) : 1;
  AttendCase::Item item =
      Demoted(rng, shape, num_sets, kLengths[rng() % std::size(kLengths)] + tokens, tokens,
              kFractions[rng() % std::size(kFractions)]);
  RecallImage& recall = *item.recall;
  recall.max_picks = kMaxPicks[rng() % std::size(kMaxPicks)];
  recall.min_share = kMinShares[rng() % std::size(kMinShares)];
  if (rng() % 3 == 0) recall.sketch.channels = 8 * (1 + static_cast<int>(rng() % 4));
  if (rng() % 3 == 0) recall.host[rng() % recall.host.size()].clear();
  if (rng() % 4 == 0) {  // dropped: neither resident nor demoted
    for (int i = 0; i < 10; ++i) {
      SetDemoted(recall, static_cast<int>(rng() % num_sets),
                 static_cast<Position>(rng() % recall.num_positions), false);
    }
  }
  return item;
}

AttendCase RandomRecallCase(std::mt19937& rng, const KvShape& shape, int num_items) {
  AttendCase attend{.shape = shape, .items = {}, .queries = {}, .scale = 0};
  for (int i = 0; i < num_items; ++i) attend.items.push_back(RandomItem(rng, shape));
  attend.queries = RandomFloats(rng, attend.num_tokens() * shape.num_query_heads * shape.head_dim);
  attend.scale = static_cast<float>(1 / std::sqrt(shape.head_dim));
  return attend;
}

AttendCase OneItem(std::mt19937& rng, const KvShape& shape, AttendCase::Item item) {
  AttendCase attend{.shape = shape, .items = {std::move(item)}, .queries = {}, .scale = 0};
  attend.queries = RandomFloats(rng, attend.num_tokens() * shape.num_query_heads * shape.head_dim);
  attend.scale = static_cast<float>(1 / std::sqrt(shape.head_dim));
  return attend;
}

double Element(const std::vector<std::byte>& row, int i, KvDtype dtype) {
  return WithKvElement(dtype, [&]<typename T>(std::type_identity<T>) {
    return double{ToFloat(reinterpret_cast<const T*>(row.data())[i])};
  });
}

// Queries of one token of a case with one item.
const float* QueryOf(const AttendCase& attend, int64_t token, int head) {
  return attend.queries.data() +
         (token * attend.shape.num_query_heads + head) * attend.shape.head_dim;
}

double SlotsLogSumExp(const AttendCase& attend, int64_t token, int head) {
  const AttendCase::Item& item = attend.items[0];
  const int kv_head = head / attend.shape.group_size();
  const int set = item.layer.num_sets == 1 ? 0 : kv_head;
  double sum = 0;
  for (int64_t slot = 0; slot < item.layer.used; ++slot) {
    const Position position = item.layer.positions[set * item.layer.capacity + slot];
    if (position == kNoPosition || position > item.first_position + token) continue;
    const auto key = StoredRow(item.layer.keys, attend.shape, item.layer.capacity, kv_head, slot);
    double dot = 0;
    for (int i = 0; i < attend.shape.head_dim; ++i) {
      dot += QueryOf(attend, token, head)[i] * Element(key, i, attend.shape.dtype);
    }
    sum += std::exp(dot * attend.scale);
  }
  return std::log(sum);
}

// The oracle's view of one token and KV head of a case with one item.
PickQuery PickQueryOf(const AttendCase& attend, const DeviceRecall& recall, int64_t token,
                      int kv_head) {
  PickQuery pick{.recall = recall.view(),
                 .num_sets = attend.items[0].layer.num_sets,
                 .kv_head = kv_head,
                 .queries = {},
                 .lse = {},
                 .scale = attend.scale};
  for (int i = 0; i < attend.shape.group_size(); ++i) {
    const int head = kv_head * attend.shape.group_size() + i;
    pick.queries.push_back(QueryOf(attend, token, head));
    pick.lse.push_back(SlotsLogSumExp(attend, token, head));
  }
  return pick;
}

// Value of every demoted position.
std::map<Position, double> Values(const PickQuery& pick) {
  const std::vector<Position> demoted = DemotedPositions(pick.recall, pick.num_sets, pick.kv_head);
  const auto logits = EstimateLogits(pick, demoted);
  std::map<Position, double> values;
  for (size_t i = 0; i < demoted.size(); ++i) {
    double sum = 0;
    for (size_t head = 0; head < pick.lse.size(); ++head) {
      sum += std::exp(logits[i][head] - pick.lse[head]);
    }
    values[demoted[i]] = sum / static_cast<double>(pick.lse.size());
  }
  return values;
}

// Picks may differ where values lie within 1e-4 of the cut or of min_share, and
// nowhere else.
void ExpectPicksDifferAtTheCutOnly(const AttendCase& attend, Backend& oracle,
                                   const RecallOutcome& actual, const RecallOutcome& expected) {
  const RecallImage& image = *attend.items[0].recall;
  const DeviceRecall recall(oracle, attend.shape, image, attend.items[0].num_tokens);
  for (size_t i = 0; i < expected.picks.size(); ++i) {
    const auto token = static_cast<int64_t>(i) / attend.shape.num_kv_heads;
    const int kv_head = static_cast<int>(i) % attend.shape.num_kv_heads;
    const auto values = Values(PickQueryOf(attend, recall, token, kv_head));
    double cut = image.min_share;
    if (static_cast<int64_t>(expected.picks[i].size()) == image.max_picks) {
      cut = INFINITY;
      for (const Position pick : expected.picks[i]) cut = std::min(cut, values.at(pick));
    }
    std::vector<Position> differing;
    std::set_symmetric_difference(actual.picks[i].begin(), actual.picks[i].end(),
                                  expected.picks[i].begin(), expected.picks[i].end(),
                                  std::back_inserter(differing));
    for (const Position position : differing) {
      EXPECT_NEAR(values.at(position), cut, 1e-4 * cut) << "position " << position;
    }
  }
}

TEST_P(BackendTest, AttendWithRecallEqualsTheOracleOverRandomShapes) {
  int cases = 0;
  int differing = 0;
  for (unsigned seed = 1; seed <= 80; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const KvShape shape = RandomShape(rng, 1 + static_cast<int>(seed % 12));
    const AttendCase attend = RandomRecallCase(rng, shape, 1);
    const AttendOutcome actual = RunAttend(backend(), attend);
    const AttendOutcome expected = RunAttend(oracle(), attend);
    ExpectPicksDifferAtTheCutOnly(attend, oracle(), actual.recall[0], expected.recall[0]);
    if (HasFailure()) return;
    ++cases;
    if (actual.recall[0].picks != expected.recall[0].picks) {
      ++differing;
      continue;
    }
    const int64_t queries = attend.num_tokens() * shape.group_size();
    ExpectClose(actual, expected, queries);
    ExpectClose({.out = {}, .gains = {actual.recall[0].gains}},
                {.out = {}, .gains = {expected.recall[0].gains}}, queries);
    for (size_t i = 0; i < expected.recall[0].missing.size(); ++i) {
      ASSERT_NEAR(actual.recall[0].missing[i], expected.recall[0].missing[i],
                  1e-6 + 1e-4 * expected.recall[0].missing[i]);
    }
    if (HasFailure()) return;
  }
  EXPECT_LE(differing, cases / 20);
}

TEST_P(BackendTest, TheEstimateIsTheProductWithTheDecodedKeyUpToTheWeightsRounding) {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    std::mt19937 rng(seed);
    const KvShape shape = RandomShape(rng, 2);
    const AttendCase attend = OneItem(rng, shape, Demoted(rng, shape, 1, 100, 1, 0.7));
    const DeviceRecall recall(oracle(), shape, *attend.items[0].recall, 1);
    const SketchShape& sketch = recall.view().sketch;
    const std::vector<uint8_t> channels = recall.Channels();
    for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      const PickQuery pick = PickQueryOf(attend, recall, 0, kv_head);
      const std::vector<Position> demoted = DemotedPositions(pick.recall, 1, kv_head);
      const auto logits = EstimateLogits(pick, demoted);
      for (size_t k = 0; k < demoted.size(); ++k) {
        const std::vector<std::byte> bytes = recall.Page(demoted[k] / shape.page_tokens);
        const SketchPage page = SketchPageAt(sketch, bytes.data() + kv_head * sketch.page_bytes());
        const uint8_t* chosen = channels.data() + kv_head * sketch.channels;
        std::vector<float> key(shape.head_dim);
        DecodeSketchRow(sketch, page, chosen, demoted[k] % shape.page_tokens, key.data());
        for (int head = 0; head < 2; ++head) {
          double dot = 0;
          double largest = 0;
          for (int i = 0; i < shape.head_dim; ++i) dot += double{pick.queries[head][i]} * key[i];
          std::vector<float> products(sketch.channels);
          for (int i = 0; i < sketch.channels; ++i) {
            products[i] =
                pick.queries[head][chosen[i]] * attend.scale * Float16ToFloat(page.steps[i]);
            largest = std::max<double>(largest, std::abs(products[i]));
          }
          const double bound = sketch.channels * 15 * 0.5 * largest / 127;
          ASSERT_NEAR(logits[k][head], dot * attend.scale, bound + 1e-4);
        }
      }
    }
  }
}

TEST_P(BackendTest, RecallOfAllEqualsAttentionToEverything) {
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const KvShape shape = RandomShape(rng, 1 + static_cast<int>(seed % 12));
    const int num_sets = seed % 2 == 0 ? 1 : shape.num_kv_heads;
    const int64_t tokens = 1 + static_cast<int64_t>(rng() % 5);
    AttendCase attend = OneItem(
        rng, shape,
        Demoted(rng, shape, num_sets, 3 + static_cast<int64_t>(rng() % 700) + tokens, tokens, 0.8));
    AttendCase::Item& item = attend.items[0];
    item.recall->all = true;
    AttendCase full = attend;  // the same with every position in its slot
    full.items[0].recall.reset();
    const int64_t length = item.layer.capacity;
    for (int set = 0; set < num_sets; ++set) {
      std::iota(full.items[0].layer.positions.begin() + set * length,
                full.items[0].layer.positions.begin() + (set + 1) * length, 0);
    }
    const int64_t row_bytes = shape.row_bytes() / 2;
    for (int64_t row = 0; row < shape.num_kv_heads * length; ++row) {
      const int64_t position = row % length;
      const auto& page =
          item.recall->host[row / length * item.recall->num_pages() + position / shape.page_tokens];
      const auto from = page.begin() + position % shape.page_tokens * shape.row_bytes();
      std::copy(from, from + row_bytes, full.items[0].layer.keys.begin() + row * row_bytes);
      std::copy(from + row_bytes, from + 2 * row_bytes,
                full.items[0].layer.values.begin() + row * row_bytes);
    }
    AttendOutcome actual = RunAttend(backend(), attend);
    for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      const int64_t stride = item.recall->num_pages() * shape.page_tokens;
      for (int64_t position = 0; position < length; ++position) {
        actual.gains[0][kv_head * length + position] +=
            actual.recall[0].gains[kv_head * stride + position];
      }
    }
    for (const float missing : actual.recall[0].missing) EXPECT_EQ(missing, 0);
    ExpectClose(actual, RunAttend(oracle(), full), tokens * shape.group_size());
    if (HasFailure()) return;
  }
}

TEST_P(BackendTest, GainsOfSlotsAndPicksAddUpToOnePerQueryHead) {
  for (const int group : {1, 3, 8, 12}) {
    std::mt19937 rng(group);
    const KvShape shape = Shape(2 * group, 2, 64, KvDtype::kBFloat16);
    const AttendCase attend = OneItem(rng, shape, Demoted(rng, shape, 1, 703, 3, 0.9));
    const AttendOutcome outcome = RunAttend(backend(), attend);
    const int64_t stride = static_cast<int64_t>(outcome.recall[0].gains.size()) / 2;
    for (int kv_head = 0; kv_head < 2; ++kv_head) {
      const auto slots = outcome.gains[0].begin() + kv_head * 703;
      const auto picks = outcome.recall[0].gains.begin() + kv_head * stride;
      const int64_t of_picks = std::accumulate(picks, picks + stride, int64_t{0});
      const int64_t sum = std::accumulate(slots, slots + 703, of_picks);
      EXPECT_GT(of_picks, 0);
      EXPECT_NEAR(sum, 3 * group * kOne, 3 * group * 703);
    }
  }
}

TEST_P(BackendTest, RecallInARaggedBatchEqualsEachSequenceAloneBitForBit) {
  for (unsigned seed = 1; seed <= 15; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const KvShape shape = RandomShape(rng, 1 + static_cast<int>(seed % 12));
    AttendCase batch = RandomRecallCase(rng, shape, 5);
    batch.items[1].recall.reset();
    batch.items[3].recall->all = true;
    const AttendOutcome together = RunAttend(backend(), batch);
    std::vector<float> alone_out;
    for (size_t item = 0; item < batch.items.size(); ++item) {
      const AttendOutcome alone = RunAttend(backend(), batch.Alone(item));
      alone_out.insert(alone_out.end(), alone.out.begin(), alone.out.end());
      EXPECT_EQ(together.gains[item], alone.gains[0]) << "item " << item;
      EXPECT_EQ(together.recall[item].gains, alone.recall[0].gains) << "item " << item;
      EXPECT_EQ(together.recall[item].picks, alone.recall[0].picks) << "item " << item;
      EXPECT_EQ(together.recall[item].missing, alone.recall[0].missing) << "item " << item;
    }
    ExpectSameBits(together.out, alone_out);
  }
}

TEST_P(BackendTest, EveryTokenOfAnAppendPicksForItselfBitForBit) {
  for (const int group : {1, 3, 5, 9}) {
    for (const bool all : {false, true}) {
      std::mt19937 rng(group);
      const KvShape shape = Shape(2 * group, 2, 64, KvDtype::kBFloat16);
      AttendCase chunk = OneItem(rng, shape, Demoted(rng, shape, 2, 550, 13, 0.8));
      chunk.items[0].recall->max_picks = 7;
      chunk.items[0].recall->all = all;
      const AttendOutcome together = RunAttend(backend(), chunk);
      std::vector<float> out;
      RecallOutcome recall{.gains = std::vector<int64_t>(together.recall[0].gains.size()),
                           .picks = {},
                           .missing = {}};
      const int64_t row = 2 * group * 64;
      for (int token = 0; token < 13; ++token) {
        AttendCase one = chunk;
        one.items[0].num_tokens = 1;
        one.items[0].first_position = chunk.items[0].first_position + token;
        one.queries.assign(chunk.queries.begin() + token * row,
                           chunk.queries.begin() + (token + 1) * row);
        const AttendOutcome alone = RunAttend(backend(), one);
        out.insert(out.end(), alone.out.begin(), alone.out.end());
        const RecallOutcome& of_token = alone.recall[0];
        for (size_t i = 0; i < recall.gains.size(); ++i) recall.gains[i] += of_token.gains[i];
        recall.picks.insert(recall.picks.end(), of_token.picks.begin(), of_token.picks.end());
        recall.missing.insert(recall.missing.end(), of_token.missing.begin(),
                              of_token.missing.end());
      }
      ExpectSameBits(together.out, out);
      EXPECT_EQ(together.recall[0].gains, recall.gains);
      EXPECT_EQ(together.recall[0].picks, recall.picks);
      EXPECT_EQ(together.recall[0].missing, recall.missing);
      EXPECT_EQ(recall.picks[0] == recall.picks[4], all) << "nothing told the tokens apart";
    }
  }
}

TEST_P(BackendTest, RecallWithNothingDemotedChangesNoBit) {
  std::mt19937 rng(3);
  const KvShape shape = Shape(6, 2, 80, KvDtype::kFloat32);
  const AttendCase with = OneItem(rng, shape, Demoted(rng, shape, 1, 600, 2, 0.0));
  AttendCase without = with;
  without.items[0].recall.reset();
  const AttendOutcome actual = RunAttend(backend(), with);
  const AttendOutcome expected = RunAttend(backend(), without);
  ExpectSameBits(actual.out, expected.out);
  EXPECT_EQ(actual.gains, expected.gains);
  EXPECT_EQ(actual.recall[0].picks, std::vector<std::vector<Position>>(4));
  EXPECT_EQ(actual.recall[0].missing, std::vector<float>(4, 0.0f));
}

// The outputs of one item, made by the caller from the case.
std::vector<float> AttendAlone(Backend& backend, const AttendCase& attend, const AttendItem& item) {
  const DeviceBuffer queries = Upload(backend, attend.queries);
  const DeviceBuffer out = Upload(backend, std::vector<float>(attend.queries.size()));
  const DeviceBuffer scratch = AttendScratch(backend, attend.shape, {&item, 1});
  Stream stream;
  EXPECT_TRUE(backend
                  .Attend(attend.shape,
                          {.items = {&item, 1},
                           .queries = queries.As<float>(),
                           .out = out.As<float>(),
                           .scratch = scratch.As<std::byte>(),
                           .scale = attend.scale},
                          stream)
                  .ok());
  return Download<float>(backend, out);
}

TEST_P(BackendTest, WhatIsNotPickedIsNotRead) {
  std::mt19937 rng(4);
  const KvShape shape = Shape(4, 2, 64, KvDtype::kBFloat16);
  const AttendCase attend = OneItem(rng, shape, Demoted(rng, shape, 2, 500, 1, 0.5));
  const AttendOutcome expected = RunAttend(backend(), attend);
  const AttendCase::Item& item = attend.items[0];
  const DeviceLayer layer(backend(), item.layer);
  DeviceRecall recall(backend(), shape, *item.recall, 1);
  recall.PoisonResidents(shape, 2);
  const AttendItem attended{.layer = layer.view(),
                            .first_token = 0,
                            .num_tokens = 1,
                            .first_position = item.first_position,
                            .recall = &recall.view()};
  ExpectSameBits(AttendAlone(backend(), attend, attended), expected.out);
}

TEST_P(BackendTest, NothingThatIsNotAskedForIsWritten) {
  std::mt19937 rng(5);
  const KvShape shape = Shape(4, 2, 64, KvDtype::kBFloat16);
  const AttendCase attend = OneItem(rng, shape, Demoted(rng, shape, 1, 300, 2, 0.8));
  const AttendOutcome expected = RunAttend(backend(), attend);
  const AttendCase::Item& item = attend.items[0];
  const DeviceLayer layer(backend(), item.layer);
  DeviceRecall recall(backend(), shape, *item.recall, 2);
  RecallView view = recall.view();
  view.gains = {};
  view.picks = {};
  view.missing = {};
  const AttendItem attended{.layer = layer.view(),
                            .first_token = 0,
                            .num_tokens = 2,
                            .first_position = item.first_position,
                            .accumulate_gains = false,
                            .recall = &view};
  ExpectSameBits(AttendAlone(backend(), attend, attended), expected.out);
  EXPECT_EQ(layer.Read().gains, item.layer.gains);
  for (size_t i = 0; i < expected.recall[0].picks.size(); ++i) {
    EXPECT_EQ(view.num_picks[i], static_cast<int>(expected.recall[0].picks[i].size()));
  }
}

TEST_P(BackendTest, EqualValuesArePickedFromTheLowestPositionOn) {
  const KvShape shape = Shape(2, 1, 64, KvDtype::kFloat32, 16);
  LayerImage full = EmptyLayer(shape, 1, 200);  // all keys equal: every estimate is the same
  full.keys = Stored(std::vector<float>(200 * 64, 1.0f), shape.dtype);
  AttendCase::Item item{.layer = full, .num_tokens = 1, .first_position = 199};
  item.layer.positions[199] = 199;
  item.recall = RecallOf(shape, full, 16);
  for (Position position = 3; position < 190; position += 2) {
    SetDemoted(*item.recall, 0, position, true);
  }
  item.recall->max_picks = 20;
  std::mt19937 rng(1);
  const AttendOutcome outcome = RunAttend(backend(), OneItem(rng, shape, item));
  std::vector<Position> expected;
  for (int i = 0; i < 20; ++i) expected.push_back(3 + 2 * i);
  EXPECT_EQ(outcome.recall[0].picks[0], expected);
}

TEST_P(BackendTest, PositionsBelowTheLeastShareAreNotPicked) {
  std::mt19937 rng(6);
  const KvShape shape = Shape(4, 1, 64, KvDtype::kFloat32);
  AttendCase attend = OneItem(rng, shape, Demoted(rng, shape, 1, 500, 1, 0.5));
  attend.items[0].recall->max_picks = 1000;
  size_t last = 1000;
  for (const float share : {1e-5f, 1e-3f, 1e-2f, 1e6f}) {
    attend.items[0].recall->min_share = share;
    const size_t picks = RunAttend(backend(), attend).recall[0].picks[0].size();
    EXPECT_LT(picks, last) << share;
    last = picks;
  }
  EXPECT_EQ(last, 0u);
}

TEST_P(BackendTest, AQueryThatSeesNoSlotPicksNothingUnlessAllIsAskedFor) {
  for (const bool used : {false, true}) {
    std::mt19937 rng(7);
    const KvShape shape = Shape(2, 1, 64, KvDtype::kFloat32);
    AttendCase attend = OneItem(rng, shape, Demoted(rng, shape, 1, 100, 1, 1.0));
    std::fill(attend.items[0].layer.positions.begin(), attend.items[0].layer.positions.end(),
              kNoPosition);
    if (!used) attend.items[0].layer.used = 0;
    const AttendOutcome none = RunAttend(backend(), attend);
    EXPECT_TRUE(none.recall[0].picks[0].empty());
    EXPECT_EQ(none.recall[0].missing[0], 1);
    EXPECT_EQ(none.out, std::vector<float>(2 * 64, 0.0f));
    attend.items[0].recall->all = true;
    attend.items[0].recall->max_picks = 50;  // as many as there is room to tell
    const AttendOutcome all = RunAttend(backend(), attend);
    EXPECT_EQ(all.recall[0].picks[0].size(), 50u);
    EXPECT_EQ(all.recall[0].missing[0], 0);
    EXPECT_NEAR(std::accumulate(all.recall[0].gains.begin(), all.recall[0].gains.end(), int64_t{0}),
                2 * kOne, 200);
  }
}

TEST_P(BackendTest, MissingIsTheShareOfWhatIsLeftOutWhenEstimatesAreExact) {
  // Keys 0 everywhere: every position weighs the same, and the sketch is exact.
  const KvShape shape = Shape(2, 1, 64, KvDtype::kFloat32, 16);
  const LayerImage full = EmptyLayer(shape, 1, 200);
  AttendCase::Item item{.layer = full, .num_tokens = 1, .first_position = 199};
  for (Position position = 150; position < 200; ++position)
    item.layer.positions[position] = position;
  item.recall = RecallOf(shape, full, 16);
  for (Position position = 0; position < 150; ++position) {
    SetDemoted(*item.recall, 0, position, true);
  }
  item.recall->max_picks = 30;
  std::mt19937 rng(1);
  const AttendOutcome outcome = RunAttend(backend(), OneItem(rng, shape, item));
  EXPECT_NEAR(outcome.recall[0].missing[0], 120.0 / 200, 1e-6);
}

TEST_P(BackendTest, PicksHoldMostOfTheMassOfTheTrueBest) {
  double picked = 0;
  double best = 0;
  for (unsigned seed = 1; seed <= 10; ++seed) {
    std::mt19937 rng(seed);
    const KvShape shape = Shape(8, 2, 64, KvDtype::kBFloat16, 256);
    AttendCase attend = OneItem(rng, shape, Demoted(rng, shape, 1, 1500, 1, 0.9));
    const auto mass_of = [&](const RecallOutcome& all, int kv_head, Position position) {
      return static_cast<double>(
          all.gains[kv_head * (static_cast<int64_t>(all.gains.size()) / 2) + position]);
    };
    const AttendOutcome recall = RunAttend(backend(), attend);
    attend.items[0].recall->all = true;
    const AttendOutcome all = RunAttend(backend(), attend);
    for (int kv_head = 0; kv_head < 2; ++kv_head) {
      const std::vector<Position>& picks = recall.recall[0].picks[kv_head];
      EXPECT_EQ(picks.size(), 64u);
      for (const Position pick : picks) picked += mass_of(all.recall[0], kv_head, pick);
      const int64_t stride = static_cast<int64_t>(all.recall[0].gains.size()) / 2;
      const auto first = all.recall[0].gains.begin() + kv_head * stride;
      std::vector<int64_t> gains(first, first + stride);
      std::sort(gains.rbegin(), gains.rend());
      best += static_cast<double>(std::accumulate(gains.begin(), gains.begin() + 64, int64_t{0}));
    }
  }
  EXPECT_GT(picked, 0.85 * best);
  EXPECT_LT(picked, best);
}

}  // namespace
}  // namespace heavywater
