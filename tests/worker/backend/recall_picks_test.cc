// Backend::Attend with recall: what is picked, read and reported.
#include <algorithm>
#include <numeric>
#include <vector>

#include "tests/worker/backend/recall_case.h"

namespace heavywater {
namespace {

constexpr int64_t kOne = int64_t{1} << 32;

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
  const KvShape shape = RecallShape(4, 2, 64, KvDtype::kBFloat16);
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
  const KvShape shape = RecallShape(4, 2, 64, KvDtype::kBFloat16);
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

// What the last of `num_positions` picks where all keys, and so all estimates, are equal.
std::vector<Position> PicksOfEqualKeys(Backend& backend, int page_tokens, Position num_positions,
                                       const std::vector<Position>& demoted, int64_t max_picks) {
  const KvShape shape = RecallShape(2, 1, 64, KvDtype::kFloat32, page_tokens);
  const Position last = num_positions - 1;
  LayerImage full = EmptyLayer(shape, 1, num_positions);
  full.keys = Stored(std::vector<float>(int64_t{num_positions} * 64, 1.0f), shape.dtype);
  AttendCase::Item item{.layer = full, .num_tokens = 1, .first_position = last};
  item.layer.positions[last] = last;
  item.recall = RecallOf(shape, full, 16);
  for (const Position position : demoted) SetDemoted(*item.recall, 0, position, true);
  item.recall->max_picks = max_picks;
  std::mt19937 rng(1);
  return RunAttend(backend, OneItem(rng, shape, item)).recall[0].picks[0];
}

TEST_P(BackendTest, EqualValuesArePickedFromTheLowestPositionOn) {
  std::vector<Position> demoted;
  for (Position position = 3; position < 190; position += 2) demoted.push_back(position);
  std::vector<Position> expected;
  for (int i = 0; i < 20; ++i) expected.push_back(3 + 2 * i);
  EXPECT_EQ(PicksOfEqualKeys(backend(), 16, 200, demoted, 20), expected);
}

TEST_P(BackendTest, OfVeryManyEqualValuesTheLowestPositionsArePicked) {
  std::vector<Position> demoted(3992);
  std::iota(demoted.begin(), demoted.end(), 7);
  EXPECT_EQ(PicksOfEqualKeys(backend(), 64, 4000, demoted, 10),
            (std::vector<Position>{7, 8, 9, 10, 11, 12, 13, 14, 15, 16}));
}

TEST_P(BackendTest, PositionsBelowTheLeastShareAreNotPicked) {
  std::mt19937 rng(6);
  const KvShape shape = RecallShape(4, 1, 64, KvDtype::kFloat32);
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
    const KvShape shape = RecallShape(2, 1, 64, KvDtype::kFloat32);
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
  const KvShape shape = RecallShape(2, 1, 64, KvDtype::kFloat32, 16);
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
    const KvShape shape = RecallShape(8, 2, 64, KvDtype::kBFloat16, 256);
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
