// CASES A1 to A9 over every policy that the case can happen to: faults that users of comparable
// systems reported, each with the right value. (A2's selection and A3's arithmetic are also in
// worker/policy.)
#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/plain_sequence.h"
#include "tests/worker/rank/test_group.h"
#include "worker/policy/selection.h"

namespace heavywater {
namespace {

using ::testing::Each;
using ::testing::IsSupersetOf;
using ::testing::SizeIs;

std::vector<Position> Positions(const Ledger& ledger) {
  std::vector<Position> positions;
  for (const auto& [position, score] : ledger) positions.push_back(position);
  return positions;
}

std::vector<Position> Between(Position begin, Position end) {
  std::vector<Position> positions;
  for (Position p = begin; p < end; ++p) positions.push_back(p);
  return positions;
}

// Every policy that evicts, in every scope.
constexpr Policy kBounded[] = {Policy::kStreaming, Policy::kH2o,          Policy::kSnapKv,
                               Policy::kSnapKvH2o, Policy::kScissorhands, Policy::kPyramidKv};
constexpr Policy kBoundedInDecode[] = {Policy::kStreaming, Policy::kH2o, Policy::kSnapKvH2o,
                                       Policy::kScissorhands, Policy::kPyramidKv};
constexpr Policy kScoring[] = {Policy::kH2o, Policy::kSnapKvH2o, Policy::kScissorhands,
                               Policy::kPyramidKv};

// And those whose slots the prompt's scores can divide among KV heads.
constexpr Policy kDivided[] = {Policy::kH2o, Policy::kSnapKv, Policy::kSnapKvH2o,
                               Policy::kScissorhands, Policy::kPyramidKv};

SequenceOptions Divided(SequenceOptions sequence) {
  sequence.policy.scope = Scope::kKvHead;
  sequence.policy.head_budgets = HeadBudgets::kAdaptive;
  return sequence;
}

TestGroupOptions OneLayer() {
  TestGroupOptions options;
  options.num_layers = 1;
  return options;
}

// Attention of the last token over `positions` only, by the plain reference.
std::vector<float> AttentionOver(TestGroup& group, const std::vector<int32_t>& tokens,
                                 Position first) {
  PlainPolicy full;
  PlainLayer layer(group.plain_shape(), full);
  const std::vector<int32_t> suffix(tokens.begin() + first, tokens.end());
  const SyntheticRow rows = group.Rows(0, suffix, first);
  const std::vector<float> out = layer.Prompt(rows.q, rows.k, rows.v);
  const size_t width = out.size() / suffix.size();
  return {out.end() - static_cast<int64_t>(width), out.end()};
}

void ExpectNear(const std::vector<float>& got, const std::vector<float>& want, float tolerance) {
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], want[i], tolerance) << i;
}

// A1: writes that do not fill a full buffer. A recent-only policy with budget
// 128; a suffix of 128 pushes out the whole prefix, in chunks of any size.
TEST(CasesTest, A1PartialWritesIntoAFullBufferAttendToTheRightPositions) {
  for (int chunk : {1, 32, 44, 128}) {
    for (int prefix : {1, 127, 128, 129, 300}) {
      SCOPED_TRACE("prefix " + std::to_string(prefix) + ", chunk " + std::to_string(chunk));
      TestGroupOptions options = OneLayer();
      options.max_step_tokens = 128;
      TestGroup group(options);
      const SequenceOptions sequence =
          TestSequence(Policy::kStreaming, Scope::kLayer, 1, 127, prefix);
      const std::vector<int32_t> tokens = TestTokens(0, prefix + 129);
      ASSERT_TRUE(
          group.OpenAndRunPrompt(1, sequence, {tokens.begin(), tokens.begin() + prefix}).ok());
      for (int done = 0; done < 128; done += chunk) {
        const int count = std::min(chunk, 128 - done);
        const auto begin = tokens.begin() + prefix + done;
        ASSERT_TRUE(group.Append({{1, {begin, begin + count}}}).ok());
      }
      EXPECT_EQ(Positions(group.Sets(1, 0)[0]), Between(prefix, prefix + 128));

      // The next query sees the suffix and itself.
      ASSERT_TRUE(group.Append({{1, {tokens.back()}}}).ok());
      ExpectNear(group.Attention(0, tokens.back(), prefix + 128),
                 AttentionOver(group, tokens, prefix), 1e-5f);
    }
  }
}

// A2: equal scores, or one outsider with the largest: the window stays.
// Equal keys: every query pays every position it sees the same.
TestGroupOptions AllAlike() {
  TestGroupOptions alike = OneLayer();
  alike.rows = [shape = TestShape(alike, 0)](int layer, int32_t token, Position position) {
    SyntheticRow row = MakeSyntheticRow(shape, /*seed=*/1, layer, token, position);
    std::fill(row.k.begin(), row.k.end(), 0.5f);
    return row;
  };
  return alike;
}

TEST(CasesTest, A2TheWindowAndTheSinksStayWhenScoresTie) {
  for (Policy policy : kBounded) {
    TestGroup group(AllAlike());
    SequenceOptions sequence = TestSequence(policy, Scope::kLayer, 4, 4, 16);
    sequence.policy.window = 4;
    sequence.policy.sink_tokens = 2;
    ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 16)).ok());
    EXPECT_THAT(Positions(group.Sets(1, 0)[0]), IsSupersetOf({0, 1, 12, 13, 14, 15}));
    EXPECT_THAT(group.Sets(1, 0)[0], SizeIs(8));
  }
}

TEST(CasesTest, A2TheyStayInEveryKvHeadThatSharesSlotsAndTiesGoToTheLowerHead) {
  for (Policy policy : kDivided) {
    SCOPED_TRACE(std::string(PolicyName(policy)));
    TestGroup group(AllAlike());
    SequenceOptions sequence = Divided(TestSequence(policy, Scope::kKvHead, 4, 4, 16));
    sequence.policy.window = 4;
    sequence.policy.sink_tokens = 2;
    sequence.policy.head_budget_floor = 0;
    ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 16)).ok());
    const std::vector<Ledger> sets = group.Sets(1, 0);
    for (const Ledger& set : sets) {
      EXPECT_THAT(Positions(set), IsSupersetOf({0, 1, 12, 13, 14, 15}));
    }
    EXPECT_EQ(sets[0].size() + sets[1].size(), 16u);
    EXPECT_GE(sets[0].size(), sets[1].size());
  }
}

// A3: short inputs, extreme ratios, one layer: sets are never empty, attention
// stays finite.
void ExpectShortPromptsToKeepSomething(Policy policy, HeadBudgets head_budgets) {
  for (double ratio : {0.02, 0.2, 1.0}) {
    for (int length : {1, 2, 10}) {
      TestGroup group(OneLayer());
      SequenceOptions sequence = TestSequence(policy, Scope::kKvHead, 0, 0, length);
      sequence.policy.head_budgets = head_budgets;
      sequence.policy.heavy_ratio = ratio;
      sequence.policy.recent_ratio = ratio;
      sequence.policy.min_budget_tokens = 1;
      ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, length)).ok());
      for (const Ledger& set : group.Sets(1, 0)) EXPECT_GE(set.size(), 1u);
      ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, length)}}).ok());
      for (const Ledger& set : group.Sets(1, 0)) EXPECT_GE(set.size(), 1u);
      EXPECT_THAT(group.Attention(0, TestTokens(0, 1, length)[0], length),
                  Each(::testing::Truly([](float x) { return std::isfinite(x); })));
    }
  }
}

TEST(CasesTest, A3ShortPromptsKeepSomethingAndAttendToIt) {
  for (Policy policy : kBounded) ExpectShortPromptsToKeepSomething(policy, HeadBudgets::kEven);
  for (Policy policy : kDivided) ExpectShortPromptsToKeepSomething(policy, HeadBudgets::kAdaptive);
}

// A4: a newcomer starts with score 0 and must not be the first to go.
void ExpectTheSetToMoveOn(Policy policy, Scope scope, int recent) {
  SCOPED_TRACE(std::string(PolicyName(policy)));
  TestGroup group(OneLayer());
  const SequenceOptions sequence = TestSequence(policy, scope, 14 - recent, recent, 14);
  ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 14)).ok());
  const std::vector<Position> at_first = Positions(group.Sets(1, 0)[0]);
  for (int step = 0; step < 43; ++step) {
    const Position position = 14 + step;
    ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, position)}}).ok());
    const Ledger set = group.Sets(1, 0)[0];
    EXPECT_EQ(set.size(), 14u);
    for (int i = 0; i < recent; ++i) EXPECT_TRUE(set.contains(position - i));
    // It was attended in its own step: nothing else gives it a score.
    const bool counts = policy == Policy::kScissorhands;  // it need not have been pivotal
    if (policy != Policy::kStreaming && !counts) {
      EXPECT_GT(set.at(position), 0);
    }
  }
  EXPECT_NE(Positions(group.Sets(1, 0)[0]), at_first);
}

TEST(CasesTest, A4NewTokensAreKeptWhileTheyAreRecentAndTheSetMovesOn) {
  for (Policy policy : kBoundedInDecode) {
    for (Scope scope : {Scope::kLayer, Scope::kKvHead}) {
      for (int recent : {1, 5}) ExpectTheSetToMoveOn(policy, scope, recent);
    }
  }
}

TEST(CasesTest, A4TheyAreInEveryKvHeadThatSharesSlots) {
  for (Policy policy : kBoundedInDecode) {
    if (policy == Policy::kStreaming) continue;
    SCOPED_TRACE(std::string(PolicyName(policy)));
    TestGroup group(OneLayer());
    const SequenceOptions sequence = Divided(TestSequence(policy, Scope::kKvHead, 9, 5, 40));
    ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 40)).ok());
    const std::vector<Ledger> at_first = group.Sets(1, 0);
    for (Position position = 40; position < 83; ++position) {
      ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, position)}}).ok());
      const std::vector<Ledger> sets = group.Sets(1, 0);
      for (size_t head = 0; head < sets.size(); ++head) {
        EXPECT_EQ(sets[head].size(), at_first[head].size());
        EXPECT_TRUE(sets[head].contains(position));
      }
    }
    for (int head = 0; head < 2; ++head) {
      EXPECT_NE(Positions(group.Sets(1, 0)[head]), Positions(at_first[head]));
    }
  }
}

// A5: the next position follows from the tokens seen, not from those kept.
void ExpectTwoCounters(Policy policy, bool divided = false, int prompt = 1) {
  SCOPED_TRACE(std::string(PolicyName(policy)));
  TestGroup group(OneLayer());
  SequenceOptions sequence =
      TestSequence(policy, Scope::kLayer, 64, 64, prompt, /*more_tokens=*/299);
  if (divided) sequence = Divided(sequence);
  ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, prompt)).ok());
  for (int i = prompt; i < 300; ++i) ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, i)}}).ok());
  const SequenceStats stats = *group.cache().Stats(1);
  EXPECT_EQ(stats.tokens_seen, 300);
  EXPECT_EQ(stats.tokens_resident, 128);
  const std::vector<Ledger> sets = group.Sets(1, 0);
  for (int head = 0; head < 2; ++head) {
    for (const auto& [position, score] : sets[divided ? head : 0]) {
      const SyntheticRow row = group.Rows(0, TestTokens(0, 1, position), position);
      const std::vector<std::byte> bytes = *group.cache().ReadResident(1, 0, head, position);
      const auto* stored = reinterpret_cast<const float*>(bytes.data());
      for (int i = 0; i < 8; ++i) {
        EXPECT_EQ(stored[i], row.k[head * 8 + i]);
        EXPECT_EQ(stored[8 + i], row.v[head * 8 + i]);
      }
    }
  }
}

TEST(CasesTest, A5TokensSeenAndResidentAreSeparateAndKeysKeepTheirPositions) {
  for (Policy policy : kBoundedInDecode) ExpectTwoCounters(policy);
  for (Policy policy : kScoring) {
    for (int prompt : {1, 150}) ExpectTwoCounters(policy, /*divided=*/true, prompt);
  }
}

// A6: the prompt attends to all of itself whatever the budget; eviction takes
// effect afterwards.
void ExpectThePromptToAttendToItself(Policy policy, bool divided = false) {
  SCOPED_TRACE(std::string(PolicyName(policy)));
  std::vector<std::vector<float>> first;
  for (int budget : {4096, 60, 50, 40, 32}) {
    TestGroup group(OneLayer());
    SequenceOptions sequence = TestSequence(policy, Scope::kLayer, budget / 2, budget / 2, 96);
    if (divided) sequence = Divided(sequence);
    PlainSequence plain(group, sequence.policy);
    const std::vector<int32_t> tokens = TestTokens(0, 96);
    ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, tokens).ok());
    plain.Prompt(tokens);
    std::vector<std::vector<float>> out;
    for (int i = 0; i < 96; ++i) out.push_back(group.Attention(0, tokens[i], i));
    if (first.empty()) first = out;
    EXPECT_EQ(out, first) << "budget " << budget;

    ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, 96)}}).ok());
    plain.Append(TestTokens(0, 1, 96));
    EXPECT_EQ(plain.Compare(group, 1, 1000), "") << "budget " << budget;
  }
}

TEST(CasesTest, A6TheBudgetDoesNotChangeWhatThePromptAttendsTo) {
  for (Policy policy : kBounded) ExpectThePromptToAttendToItself(policy);
  for (Policy policy : kDivided) ExpectThePromptToAttendToItself(policy, /*divided=*/true);
}

// A7: scores of one sequence never mix with another's in the batch.
void ExpectTheSameAloneAndBatched(Policy policy, bool divided = false) {
  SCOPED_TRACE(std::string(PolicyName(policy)));
  SequenceOptions x = TestSequence(policy, Scope::kLayer, 24, 60, 124);
  if (divided) x = Divided(x);
  std::vector<std::vector<Ledger>> alone;
  for (const bool batched : {false, true}) {
    TestGroup group(OneLayer());
    ASSERT_TRUE(group.OpenAndRunPrompt(1, x, TestTokens(0, 124)).ok());
    if (batched) {
      ASSERT_TRUE(group
                      .OpenAndRunPrompt(2, TestSequence(Policy::kH2o, Scope::kLayer, 5, 2, 7),
                                        TestTokens(9, 7))
                      .ok());
    }
    std::vector<std::vector<Ledger>> sets;
    for (int i = 124; i < 200; ++i) {
      std::vector<TestAppend> appends = {{1, TestTokens(0, 1, i)}};
      if (batched) appends.insert(appends.begin(), {2, TestTokens(9, 1, i - 117)});
      ASSERT_TRUE(group.Append(appends).ok());
      sets.push_back(group.Sets(1, 0));
    }
    if (!batched) alone = sets;
    EXPECT_EQ(sets, alone);
  }
}

TEST(CasesTest, A7ASequenceIsTheSameAloneAndBesideAVeryDifferentOne) {
  for (Policy policy : kBounded) ExpectTheSameAloneAndBatched(policy);
  for (Policy policy : kDivided) ExpectTheSameAloneAndBatched(policy, /*divided=*/true);
}

// A8: one set per KV head, scored by the sum over its query heads; KV is stored
// once for the group.
void ExpectOneSetForAGroup(Policy policy, bool divided = false) {
  SCOPED_TRACE(std::string(PolicyName(policy)));
  TestGroupOptions options = OneLayer();
  options.query_heads = 8;
  options.kv_heads = 2;
  options.dtype = KvDtype::kBFloat16;
  TestGroup group(options);
  SequenceOptions sequence = TestSequence(policy, Scope::kKvHead, 8, 8, 64);
  sequence.policy.window = 8;
  if (divided) sequence = Divided(sequence);
  PlainSequence plain(group, sequence.policy);
  ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 64)).ok());
  plain.Prompt(TestTokens(0, 64));
  EXPECT_EQ(plain.Compare(group, 1, 1000), "");
  EXPECT_THAT(group.Sets(1, 0), SizeIs(2));
  // 16 kept (in the mean, where heads share) and one slot for the interval: K and V, 2 heads, of 8
  // elements.
  const int64_t slots = 17;
  const int64_t kv_bytes = 2 * 2 * slots * 8 * 2;
  EXPECT_EQ(group.cache().memory().gauge(MemoryKind::kSlots).current_bytes, kv_bytes);
  const int64_t tables = 2 * slots * 4 + (2 + 2) * slots * 8;
  EXPECT_EQ(group.cache().Stats(1)->device_bytes, kv_bytes + tables);
}

TEST(CasesTest, A8GroupedHeadsShareASetAndItsBytes) {
  for (Policy policy : kScoring) ExpectOneSetForAGroup(policy);
  for (Policy policy : kScoring) ExpectOneSetForAGroup(policy, /*divided=*/true);
}

// A9: exact ties at the cut, half of all scores equal.
TEST(CasesTest, A9TiesGoToTheLowerPositionOnEveryBackend) {
  constexpr int kCount = 4096;
  constexpr int kBudget = 2048;
  std::vector<Position> positions = Between(0, kCount);
  std::vector<int64_t> scores(kCount, 1000);
  for (int i = 0; i < kCount; i += 4) scores[i] = 5000 + i;  // a quarter above, the rest tie
  const SelectionParams params{
      .budget_tokens = kBudget, .recent_tokens = 64, .tokens_seen = kCount};
  std::vector<uint8_t> want(kCount, 0);
  for (int32_t index : SelectKept({positions, scores}, params)) want[index] = 1;
  EXPECT_EQ(std::count(want.begin(), want.end(), 1), kBudget);
  // Of the ties those at the lowest positions stay: the first that goes ends them.
  bool gone = false;
  for (int i = 0; i < kCount - 64; ++i) {
    if (scores[i] != 1000) {
      EXPECT_EQ(want[i], 1);
      continue;
    }
    gone = gone || want[i] == 0;
    EXPECT_EQ(want[i], gone ? 0 : 1);
  }
  std::unique_ptr<Backend> backends[] = {CreateReferenceBackend(), *CreateCpuBackend({})};
  for (const std::unique_ptr<Backend>& backend : backends) {
    for (int repeat = 0; repeat < 10; ++repeat) {
      std::vector<uint8_t> kept(kCount);
      SelectParams select;
      select.positions = DeviceSpan<const Position>(positions.data(), kCount);
      select.scores = DeviceSpan<const int64_t>(scores.data(), kCount);
      select.kept = DeviceSpan<uint8_t>(kept.data(), kCount);
      select.stride = select.count = kCount;
      select.selection = params;
      Stream stream;
      ASSERT_TRUE(backend->Select(select, stream).ok());
      EXPECT_EQ(kept, want) << backend->Name();
    }
  }
}

// A9, second part: contributions of ranks that would sum to different floats in
// another order (1e8, 1, -1e8) are integers here. Whichever rank brings which,
// the group keeps the same.
TEST(CasesTest, A9TheOrderInWhichRanksAddTheirScoresNeverMatters) {
  std::vector<Ledger> first;
  for (const std::vector<int>& order : {std::vector<int>{0, 1, 2}, {2, 0, 1}, {1, 2, 0}}) {
    TestGroupOptions options = OneLayer();
    options.world_size = 3;
    options.kv_heads = 3;
    options.query_heads = 6;
    TestGroup group(options);
    SequenceOptions sequence = TestSequence(Policy::kH2o, Scope::kLayer, 8, 4, 40);
    ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 40)).ok());
    const int64_t parts[] = {int64_t{1} << 40, 1, -(int64_t{1} << 40)};
    group.tamper = [&](std::vector<DeviceSpan<int64_t>>& buffers) {
      // Slot 2's gain grows by 1 in all, slot 3's by 0.
      const int64_t last = buffers[0].size() - 13;  // 13 slots in use
      for (int rank = 0; rank < 3; ++rank) {
        buffers[rank].device_address()[last + 2] += parts[order[rank]];
        buffers[rank].device_address()[last + 3] += order[rank] == 1 ? 0 : parts[order[rank]];
      }
    };
    ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, 40)}}).ok());
    const std::vector<Ledger> sets = group.Sets(1, 0);
    if (first.empty()) first = sets;
    EXPECT_EQ(sets, first);
    const uint64_t hash = group.cache(0).Report(1, false)->hash;
    for (int rank = 1; rank < 3; ++rank) EXPECT_EQ(group.cache(rank).Report(1, false)->hash, hash);
  }
}

}  // namespace
}  // namespace heavywater
