// Backend::Attend with recall.
#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <numeric>

#include "cache_service/base/float16.h"
#include "tests/worker/backend/recall_case.h"
#include "worker/backend/reference/recall_oracle.h"
#include "worker/backend/sketch.h"
#include "worker/cache/kv_element.h"

namespace heavywater {
namespace {

constexpr int64_t kOne = int64_t{1} << 32;

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

// The value of the last one that is picked, wherever it lies.
double LeastPicked(const std::map<Position, double>& values, const RecallImage& image) {
  std::vector<double> all;
  for (const auto& [position, value] : values) {
    if (value >= image.min_share) all.push_back(value);
  }
  std::sort(all.rbegin(), all.rend());
  const auto count = static_cast<size_t>(image.max_picks);
  return all.size() < count ? double{image.min_share} : all[count - 1];
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
    } else if (!image.resting.empty()) {
      cut = LeastPicked(values, image);  // of those, too, that were taken out
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
    const KvShape shape = RandomRecallShape(rng, 1 + static_cast<int>(seed % 12));
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

TEST_P(BackendTest, PicksOnPagesThatRestAreTakenOutAndNotedAsTheOracleDoesItOverRandomShapes) {
  if (!backend().CanRest()) GTEST_SKIP() << "pages of " << backend().Name() << " do not rest";
  int differing = 0;
  int64_t missed = 0;
  for (unsigned seed = 101; seed <= 160; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const KvShape shape = RandomRecallShape(rng, 1 + static_cast<int>(seed % 12));
    AttendCase attend = RandomRecallCase(rng, shape, 1);
    RecallImage& image = *attend.items[0].recall;
    const int one_in = 1 + static_cast<int>(rng() % 4);
    for (int64_t i = 0; i < shape.num_kv_heads * image.num_pages(); ++i) {
      const bool has_copy = !image.host[static_cast<size_t>(i)].empty();
      image.resting.push_back(has_copy && rng() % one_in == 0 ? 1 : 0);
    }
    const AttendOutcome actual = RunAttend(backend(), attend);
    const AttendOutcome expected = RunAttend(oracle(), attend);
    ExpectPicksDifferAtTheCutOnly(attend, oracle(), actual.recall[0], expected.recall[0]);
    if (HasFailure()) return;
    if (actual.recall[0].picks != expected.recall[0].picks ||
        actual.recall[0].num_missed != expected.recall[0].num_missed) {
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
    for (size_t i = 0; i < expected.recall[0].missed.size(); ++i) {
      const auto want = static_cast<double>(expected.recall[0].missed[i]);
      ASSERT_NEAR(static_cast<double>(actual.recall[0].missed[i]), want, 1e4 + 1e-4 * want);
      missed += expected.recall[0].missed[i];
    }
    for (const std::vector<Position>& picks : actual.recall[0].picks) {
      const size_t head = static_cast<size_t>(&picks - actual.recall[0].picks.data()) %
                          static_cast<size_t>(shape.num_kv_heads);
      for (const Position pick : picks) {
        EXPECT_EQ(image.resting[head * image.num_pages() + pick / shape.page_tokens], 0);
      }
    }
    if (HasFailure()) return;
  }
  EXPECT_LE(differing, 3);
  EXPECT_GT(missed, 10 * kOne);
}

TEST_P(BackendTest, WhereNoPageRestsTheMaskOfRestingPagesChangesNoBit) {
  if (!backend().CanRest()) GTEST_SKIP() << "pages of " << backend().Name() << " do not rest";
  std::mt19937 rng(11);
  const KvShape shape = RecallShape(8, 2, 64, KvDtype::kBFloat16);
  AttendCase attend = OneItem(rng, shape, Demoted(rng, shape, 1, 700, 2, 0.8));
  const AttendOutcome without = RunAttend(backend(), attend);
  attend.items[0].recall->resting.assign(2 * attend.items[0].recall->num_pages(), 0);
  const AttendOutcome with = RunAttend(backend(), attend);
  ExpectSameBits(with.out, without.out);
  EXPECT_EQ(with.recall[0].picks, without.recall[0].picks);
  EXPECT_EQ(with.recall[0].missing, without.recall[0].missing);
  for (const int64_t missed : with.recall[0].missed) EXPECT_EQ(missed, 0);
  for (const int32_t missed : with.recall[0].num_missed) EXPECT_EQ(missed, 0);
}

TEST_P(BackendTest, TheEstimateIsTheProductWithTheDecodedKeyUpToTheWeightsRounding) {
  for (unsigned seed = 1; seed <= 10; ++seed) {
    std::mt19937 rng(seed);
    const KvShape shape = RandomRecallShape(rng, 2);
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
    const KvShape shape = RandomRecallShape(rng, 1 + static_cast<int>(seed % 12));
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
    const KvShape shape = RecallShape(2 * group, 2, 64, KvDtype::kBFloat16);
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
    const KvShape shape = RandomRecallShape(rng, 1 + static_cast<int>(seed % 12));
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
      const KvShape shape = RecallShape(2 * group, 2, 64, KvDtype::kBFloat16);
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
  const KvShape shape = RecallShape(6, 2, 80, KvDtype::kFloat32);
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

}  // namespace
}  // namespace heavywater
