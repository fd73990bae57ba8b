// Backend::Select against SelectKept() and against the rule as it reads; CollectVictims.
#include <algorithm>
#include <numeric>

#include "tests/worker/backend/backend_test_base.h"

namespace heavywater {
namespace {

struct Set {
  std::vector<Position> positions;
  std::vector<int64_t> scores;
};

std::vector<uint8_t> Select(Backend& backend, const std::vector<Set>& sets, int64_t count,
                            const SelectionParams& selection) {
  std::vector<Position> positions;
  std::vector<int64_t> scores;
  for (const Set& set : sets) {
    positions.insert(positions.end(), set.positions.begin(), set.positions.end());
    scores.insert(scores.end(), set.scores.begin(), set.scores.end());
  }
  const auto num_sets = static_cast<int>(sets.size());
  const DeviceBuffer position_buffer = Upload(backend, positions);
  const DeviceBuffer score_buffer = Upload(backend, scores);
  const DeviceBuffer kept = Upload(backend, std::vector<uint8_t>(num_sets * count, 9));
  Stream stream;
  EXPECT_TRUE(backend
                  .Select({.positions = position_buffer.As<Position>(),
                           .scores = score_buffer.As<int64_t>(),
                           .kept = kept.As<uint8_t>(),
                           .num_sets = num_sets,
                           .stride = static_cast<int64_t>(sets[0].positions.size()),
                           .count = count,
                           .selection = selection},
                          stream)
                  .ok());
  return Download<uint8_t>(backend, kept);
}

// Everyone sorted: the protected first, then by score and position.
std::vector<uint8_t> SortedChoice(const Set& set, int64_t count, const SelectionParams& params) {
  std::vector<int32_t> order;
  for (int32_t i = 0; i < count; ++i) {
    if (set.positions[i] != kNoPosition) order.push_back(i);
  }
  const auto is_protected = [&](int32_t i) {
    return set.positions[i] < params.sink_tokens ||
           set.positions[i] >= params.tokens_seen - params.recent_tokens;
  };
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    if (is_protected(a) != is_protected(b)) return is_protected(a);
    if (set.scores[a] != set.scores[b]) return set.scores[a] > set.scores[b];
    return set.positions[a] < set.positions[b];
  });
  std::vector<uint8_t> kept(count, 0);
  for (size_t rank = 0; rank < order.size(); ++rank) {
    const bool stays = static_cast<int64_t>(rank) < params.budget_tokens;
    kept[order[rank]] = stays || is_protected(order[rank]);
  }
  return kept;
}

Set RandomSet(std::mt19937& rng, int64_t slots, int64_t distinct_scores) {
  Set set;
  set.positions.resize(slots);
  std::iota(set.positions.begin(), set.positions.end(), 0);
  std::shuffle(set.positions.begin(), set.positions.end(), rng);
  for (int64_t i = 0; i < slots; ++i) {
    if (rng() % 5 == 0) set.positions[i] = kNoPosition;
    set.scores.push_back(static_cast<int64_t>(rng() % distinct_scores));
  }
  return set;
}

TEST_P(BackendTest, SelectEqualsSelectKeptBitForBit) {
  for (unsigned seed = 1; seed <= 300; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 rng(seed);
    const auto slots = static_cast<int64_t>(1 + rng() % 400);
    const std::vector<Set> sets = {RandomSet(rng, slots, 1 + rng() % 20),
                                   RandomSet(rng, slots, 1u << 30)};
    const int64_t count = slots - static_cast<int64_t>(rng() % (slots / 4 + 1));
    const SelectionParams params{.budget_tokens = static_cast<int64_t>(1 + rng() % slots),
                                 .sink_tokens = static_cast<int64_t>(rng() % 5),
                                 .recent_tokens = static_cast<int64_t>(1 + rng() % 40),
                                 .tokens_seen = slots};
    const std::vector<uint8_t> kept = Select(backend(), sets, count, params);
    for (int set = 0; set < 2; ++set) {
      const std::vector<uint8_t> actual(kept.begin() + set * count,
                                        kept.begin() + (set + 1) * count);
      EXPECT_EQ(actual, SortedChoice(sets[set], count, params));
      const auto size = static_cast<size_t>(count);
      std::vector<uint8_t> oracle(count, 0);
      for (const int32_t index : SelectKept({.positions = {sets[set].positions.data(), size},
                                 .scores = {sets[set].scores.data(), size}},
                                            params)) {
        oracle[index] = 1;
      }
      EXPECT_EQ(actual, oracle);
    }
  }
}

TEST_P(BackendTest, SelectDropsTheHigherPositionOfEqualScoresWhenOneMustGo) {
  const Set set{.positions = {3, 1, 4, 0, 2}, .scores = {5, 5, 9, 5, 6}};
  EXPECT_EQ(Select(backend(), {set}, 5,
                   {.budget_tokens = 4, .sink_tokens = 0, .recent_tokens = 1, .tokens_seen = 5}),
            (std::vector<uint8_t>{0, 1, 1, 1, 1}));
}

TEST_P(BackendTest, SelectProtectsTheWindowWhenAllScoresAreEqual) {
  for (const int64_t outsider : {int64_t{0}, std::numeric_limits<int64_t>::max()}) {
    Set set{.positions = std::vector<Position>(16), .scores = std::vector<int64_t>(16, 0)};
    std::iota(set.positions.begin(), set.positions.end(), 0);
    set.scores[9] = outsider;
    const std::vector<uint8_t> kept =
        Select(backend(), {set}, 16,
               {.budget_tokens = 8, .sink_tokens = 1, .recent_tokens = 4, .tokens_seen = 16});
    EXPECT_EQ(std::count(kept.begin(), kept.end(), 1), 8);
    EXPECT_EQ(std::vector<uint8_t>(kept.begin() + 12, kept.end()), std::vector<uint8_t>(4, 1));
    EXPECT_EQ(kept[0], 1);
    EXPECT_EQ(kept[9], outsider == 0 ? 0 : 1);
  }
}

struct Victims {
  absl::Status status;
  std::vector<int32_t> slots;
  std::vector<int64_t> scores;
};

// Two sets of five slots, the last one no longer in use.
Victims CollectOf(Backend& backend, const std::vector<uint8_t>& kept, int64_t max_victims) {
  constexpr int64_t kStride = 5;
  constexpr int64_t kUsed = 4;
  const DeviceBuffer positions = Upload(
      backend, std::vector<Position>{9, kNoPosition, 4, 2, 1, kNoPosition, 7, 3, 8, kNoPosition});
  const DeviceBuffer scores =
      Upload(backend, std::vector<int64_t>{10, 11, 12, 13, 14, 20, 21, 22, 23, 24});
  const DeviceBuffer mask = Upload(backend, kept);
  const DeviceBuffer victims = Upload(backend, std::vector<int32_t>(2 * max_victims, 99));
  const DeviceBuffer victim_scores = Upload(backend, std::vector<int64_t>(2 * max_victims, 99));
  Stream stream;
  Victims got;
  got.status = backend.CollectVictims({.positions = positions.As<Position>(),
                                       .scores = scores.As<int64_t>(),
                                       .kept = mask.As<uint8_t>(),
                                       .victims = victims.As<int32_t>(),
                                       .victim_scores = victim_scores.As<int64_t>(),
                                       .num_sets = 2,
                                       .stride = kStride,
                                       .kept_stride = static_cast<int64_t>(kept.size()) / 2,
                                       .used = kUsed,
                                       .max_victims = max_victims},
                                      stream);
  if (got.status.ok()) got.status = backend.Synchronize(stream);
  got.slots = Download<int32_t>(backend, victims);
  got.scores = Download<int64_t>(backend, victim_scores);
  return got;
}

TEST_P(BackendTest, VictimsAreOccupiedSlotsThatTheMaskLeavesOut) {
  // The mask's last entries are candidates', not slots'.
  const Victims got = CollectOf(backend(), {1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0}, 3);
  ASSERT_TRUE(got.status.ok()) << got.status;
  EXPECT_EQ(got.slots, (std::vector<int32_t>{2, 3, -1, 1, 2, -1}));
  EXPECT_EQ(got.scores, (std::vector<int64_t>{12, 13, 0, 21, 22, 0}));
}

TEST_P(BackendTest, NoVictimsLeaveNoTrace) {
  const Victims got = CollectOf(backend(), std::vector<uint8_t>(10, 1), 2);
  ASSERT_TRUE(got.status.ok()) << got.status;
  EXPECT_EQ(got.slots, std::vector<int32_t>(4, -1));
}

TEST_P(BackendTest, MoreVictimsThanThereIsRoomForAreRefused) {
  const Victims got = CollectOf(backend(), std::vector<uint8_t>(10, 0), 2);
  EXPECT_EQ(got.status.code(), absl::StatusCode::kFailedPrecondition) << got.status;
}

TEST_P(BackendTest, VictimsOfManySlotsAreEveryOneThatGoesInOrder) {
  std::mt19937 rng(11);
  for (const int64_t used : {1, 31, 32, 33, 255, 256, 257, 1500}) {
    Set set = RandomSet(rng, used, 50);
    std::vector<uint8_t> kept(used);
    std::vector<int32_t> want;
    std::vector<int64_t> want_scores;
    for (int64_t slot = 0; slot < used; ++slot) {
      kept[slot] = rng() % 3 != 0;
      if (set.positions[slot] == kNoPosition || kept[slot] != 0) continue;
      want.push_back(static_cast<int32_t>(slot));
      want_scores.push_back(set.scores[slot]);
    }
    const auto max_victims = static_cast<int64_t>(want.size());
    const DeviceBuffer positions = Upload(backend(), set.positions);
    const DeviceBuffer scores = Upload(backend(), set.scores);
    const DeviceBuffer mask = Upload(backend(), kept);
    const DeviceBuffer victims = Upload(backend(), std::vector<int32_t>(max_victims, 99));
    const DeviceBuffer victim_scores = Upload(backend(), std::vector<int64_t>(max_victims, 99));
    Stream stream;
    ASSERT_TRUE(backend()
                    .CollectVictims({.positions = positions.As<Position>(),
                                     .scores = scores.As<int64_t>(),
                                     .kept = mask.As<uint8_t>(),
                                     .victims = victims.As<int32_t>(),
                                     .victim_scores = victim_scores.As<int64_t>(),
                                     .stride = used,
                                     .kept_stride = used,
                                     .used = used,
                                     .max_victims = max_victims},
                                    stream)
                    .ok());
    EXPECT_EQ(Download<int32_t>(backend(), victims), want) << used << " slots";
    EXPECT_EQ(Download<int64_t>(backend(), victim_scores), want_scores);
  }
}

}  // namespace
}  // namespace heavywater
