// Recall while host pages rest: equal to the plain reference over what was present.
#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/rank/plain_sequence.h"
#include "tests/worker/rank/resting_host_tier.h"
#include "tests/worker/rank/test_group.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

constexpr int64_t kTolerance = 2000;
constexpr int64_t kEverything = int64_t{1} << 40;

int Pick(std::mt19937& random, std::initializer_list<int> choices) {
  return choices.begin()[random() % choices.size()];
}

class RestingGroup {
 public:
  explicit RestingGroup(TestGroupOptions options) {
    options.rest_pages = true;
    for (int rank = 0; rank < options.world_size; ++rank) {
      tiers_.push_back(std::make_unique<RestingHostTier>());
      options.tiers.push_back(tiers_.back().get());
    }
    group_ = std::make_unique<TestGroup>(options);
  }
  TestGroup& operator*() { return *group_; }
  TestGroup* operator->() { return group_.get(); }
  RestingHostTier& tier(int rank) { return *tiers_[rank]; }

  SequenceRecall& recall(int rank, SequenceId id = 1) {
    return *(*group_->cache(rank).Find(id))->recall();
  }
  RecallStats Stats() {
    RecallStats sum;
    for (int rank = 0; rank < group_->world_size(); ++rank) {
      const RecallStats& stats = recall(rank).stats();
      sum.reads += stats.reads;
      sum.promoted += stats.promoted;
      sum.pages_rested += stats.pages_rested;
      sum.pages_asked += stats.pages_asked;
      sum.pages_returned += stats.pages_returned;
      sum.missed_picks += stats.missed_picks;
    }
    return sum;
  }

  // As the ranks that hold the heads have it in the step that ran last.
  PlainHostMemory HostMemory(int layer, Scope scope) {
    const int page_tokens = group_->options().page_tokens;
    const int heads = group_->options().kv_heads / group_->world_size();
    PlainHostMemory host;
    host.rests = [=, this](int kv_head, Position position) {
      return recall(kv_head / heads).Rests(layer, kv_head % heads, position / page_tokens);
    };
    host.proposes = [=, this](int kv_head, Position position) {
      const int first = kv_head / heads * heads;
      for (int head = first; head < first + heads; ++head) {
        if (scope == Scope::kLayer && host.rests(head, position)) return false;
      }
      return !host.rests(kv_head, position);
    };
    const int all_heads = group_->options().kv_heads;
    host.promotable = [=](int set, Position position) {
      for (int head = 0; head < all_heads; ++head) {
        if ((scope == Scope::kLayer || head == set) && host.rests(head, position)) return false;
      }
      return true;
    };
    return host;
  }

 private:
  std::vector<std::unique_ptr<RestingHostTier>> tiers_;
  std::unique_ptr<TestGroup> group_;
};

TestGroupOptions RandomGroup(std::mt19937& random) {
  TestGroupOptions options;
  options.world_size = Pick(random, {1, 2, 3});
  options.kv_heads = options.world_size * Pick(random, {1, 1, 2});
  options.query_heads = options.kv_heads * Pick(random, {1, 2, 3});
  options.num_layers = Pick(random, {1, 2});
  options.head_dim = Pick(random, {16, 64});
  options.page_tokens = 16;
  options.dtype = kKvDtypes[random() % 3];
  options.seed = random();
  return options;
}

SequenceOptions RandomSequence(std::mt19937& random, Policy policy, Scope scope) {
  SequenceOptions options = TestSequence(policy, scope, Pick(random, {3, 8, 16}),
                                         Pick(random, {1, 6, 12}), Pick(random, {40, 90, 130}), 96);
  options.policy.window = 8;
  options.policy.plan_interval_steps = Pick(random, {1, 2, 5, 16});
  options.policy.decay = random() % 2 == 0 ? 1.0 : 0.9;
  RecallOptions& recall = options.policy.recall;
  recall.enabled = true;
  recall.recall_tokens = Pick(random, {2, 8, 32});
  recall.min_share = random() % 2 == 0 ? 1e-4 : 1e-2;
  recall.promote_candidates = Pick(random, {1, 4, 32});
  return options;
}

constexpr Policy kPolicies[] = {Policy::kSnapKvH2o, Policy::kH2o, Policy::kSnapKvH2o,
                                Policy::kSnapKv};

TEST(RestingTest, PicksPromotionsAndOutputsEqualThePlainReferenceOverWhatIsPresent) {
  RecallStats sum;
  for (uint32_t seed = 0; seed < 80; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    RestingGroup group(RandomGroup(random));
    const Scope scope = seed / 4 % 2 == 0 ? Scope::kLayer : Scope::kKvHead;
    const SequenceOptions options = RandomSequence(random, kPolicies[seed % 4], scope);
    const std::vector<int32_t> prompt = TestTokens(0, options.prompt_tokens);
    PlainSequence plain(*group, options.policy);
    plain.Prompt(prompt);
    ASSERT_TRUE(group->OpenAndRunPrompt(1, options, prompt).ok());
    for (int layer = 0; layer < group->options().num_layers; ++layer) {
      plain.SetHostMemory(layer, group.HostMemory(layer, scope));
    }
    for (int step = 0; step < 50; ++step) {
      for (int rank = 0; rank < group->world_size(); ++rank) {
        group.tier(rank).bytes_to_rest = random() % 3 == 0 ? 4096 << random() % 6 : 0;
        group.tier(rank).Deliver(random() % 3);
      }
      const int64_t count = random() % 4 == 0 ? 2 : 1;
      const std::vector<int32_t> tokens = TestTokens(0, count, plain.tokens_seen());
      // First: which pages are there is decided when the step begins.
      const absl::Status status = group->Append({{1, tokens}});
      ASSERT_TRUE(status.ok()) << status;
      plain.Append(tokens);
      ASSERT_EQ(plain.Compare(*group, 1, kTolerance), "")
          << PolicyName(options.policy.policy) << " " << ScopeName(scope) << " TP "
          << group->world_size() << " at " << plain.tokens_seen();
    }
    const RecallStats stats = group.Stats();
    sum.reads += stats.reads;
    sum.promoted += stats.promoted;
    sum.pages_rested += stats.pages_rested;
    sum.pages_returned += stats.pages_returned;
    sum.missed_picks += stats.missed_picks;
  }
  // That the cases do what they are for.
  EXPECT_GT(sum.promoted, 300);
  EXPECT_GT(sum.pages_rested, 500);
  EXPECT_GT(sum.pages_returned, 200);
  EXPECT_GT(sum.missed_picks, 1000);
}

// What all ranks hold and what attention returned last, as bytes would differ.
void ExpectSame(RestingGroup& got, RestingGroup& want, int32_t token, Position position) {
  for (int layer = 0; layer < got->options().num_layers; ++layer) {
    ASSERT_EQ(got->Sets(1, layer), want->Sets(1, layer)) << "layer " << layer;
    ASSERT_EQ(got->Attention(layer, token, position), want->Attention(layer, token, position))
        << "layer " << layer;
  }
  for (int rank = 0; rank < got->world_size(); ++rank) {
    const auto own = got->cache(rank).Report(1, /*with_sets=*/true);
    const auto other = want->cache(rank).Report(1, /*with_sets=*/true);
    ASSERT_TRUE(own.ok() && other.ok());
    ASSERT_EQ(own->hash, other->hash);
  }
}

TEST(RestingTest, AStepThatWaitsIsTheSameAsIfNoPageHadEverRested) {
  RecallStats sum;
  int64_t waits = 0;
  for (uint32_t seed = 0; seed < 60; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937 random(seed);
    const TestGroupOptions options = RandomGroup(random);
    const Scope scope = seed / 4 % 2 == 0 ? Scope::kLayer : Scope::kKvHead;
    SequenceOptions sequence = RandomSequence(random, kPolicies[seed % 4], scope);
    sequence.policy.recall.wait = true;
    RestingGroup group(options);
    RestingGroup present(options);
    const std::vector<int32_t> prompt = TestTokens(0, sequence.prompt_tokens);
    ASSERT_TRUE(group->OpenAndRunPrompt(1, sequence, prompt).ok());
    ASSERT_TRUE(present->OpenAndRunPrompt(1, sequence, prompt).ok());
    int64_t seen = sequence.prompt_tokens;
    for (int step = 0; step < 40; ++step) {
      for (int rank = 0; rank < group->world_size(); ++rank) {
        group.tier(rank).bytes_to_rest = random() % 3 == 0 ? 4096 << random() % 6 : 0;
        group.tier(rank).comes_awaited = 1 + random() % 3;
      }
      const std::vector<int32_t> tokens = TestTokens(0, random() % 4 == 0 ? 2 : 1, seen);
      ASSERT_TRUE(group->Append({{1, tokens}}).ok());
      ASSERT_TRUE(present->Append({{1, tokens}}).ok());
      seen += static_cast<int64_t>(tokens.size());
      ExpectSame(group, present, tokens.back(), static_cast<Position>(seen - 1));
      if (testing::Test::HasFatalFailure()) return;
    }
    const RecallStats stats = group.Stats();
    ASSERT_EQ(stats.missed_picks, 0);
    ASSERT_EQ(stats.reads, present.Stats().reads);
    sum.promoted += stats.promoted;
    sum.pages_rested += stats.pages_rested;
    sum.pages_returned += stats.pages_returned;
    for (int rank = 0; rank < group->world_size(); ++rank) waits += group.tier(rank).num_waits;
  }
  EXPECT_GT(sum.promoted, 200);
  EXPECT_GT(sum.pages_rested, 300);
  EXPECT_GT(sum.pages_returned, 200);
  EXPECT_GT(waits, 200);
}

SequenceOptions RecallSequence(int64_t prompt) {
  SequenceOptions options = TestSequence(Policy::kSnapKvH2o, Scope::kLayer, 12, 8, prompt);
  options.policy.plan_interval_steps = 4;
  options.policy.recall.enabled = true;
  options.policy.recall.recall_tokens = 8;
  options.policy.recall.promote_candidates = 2;
  return options;
}

TEST(RestingTest, DoesNotDependOnTheNumberOfRanksWhereTheSamePagesArePresent) {
  std::vector<std::vector<Ledger>> of_one_rank;
  for (const int world_size : {1, 3}) {
    RestingGroup group({.world_size = world_size, .query_heads = 9, .kv_heads = 3, .head_dim = 64});
    ASSERT_TRUE(group->OpenAndRunPrompt(1, RecallSequence(100), TestTokens(0, 100)).ok());
    for (int64_t seen = 100; seen < 180; ++seen) {
      for (int rank = 0; rank < world_size; ++rank) {
        group.tier(rank).bytes_to_rest = seen == 120 || seen == 150 ? kEverything : 0;
        if (seen == 140 || seen == 165) group.tier(rank).Deliver(1000);
      }
      ASSERT_TRUE(group->Append({{1, TestTokens(0, 1, seen)}}).ok());
      const std::vector<Ledger> sets = group->Sets(1, 0);
      if (world_size == 1) {
        of_one_rank.push_back(sets);
      } else {
        ASSERT_EQ(sets, of_one_rank[seen - 100]) << "at " << seen;
      }
    }
    EXPECT_GT(group.Stats().pages_returned, 0);
    EXPECT_GT(group.Stats().missed_picks, 0);
  }
}

// Few ranks' pages rest: others' proposals of positions there are promoted nowhere.
TEST(RestingTest, APageThatRestsOnOneRankIsPromotedOnNone) {
  RestingGroup group({.world_size = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64});
  ASSERT_TRUE(group->OpenAndRunPrompt(1, RecallSequence(100), TestTokens(0, 100)).ok());
  bool all_rest = false;
  for (int64_t seen = 100; seen < 180; ++seen) {
    group.tier(1).bytes_to_rest = kEverything;
    const std::vector<Ledger> before = group->Sets(1, 0);
    ASSERT_TRUE(group->Append({{1, TestTokens(0, 1, seen)}}).ok());
    if (!all_rest) {
      all_rest = group.tier(1).num_resting() > 0;
      continue;
    }
    const std::vector<Ledger> after = group->Sets(1, 0);
    for (const auto& [position, score] : after[0]) {
      EXPECT_TRUE(position == seen || before[0].contains(position)) << position << " came back";
    }
  }
  EXPECT_TRUE(all_rest);
  EXPECT_GT(group.recall(0).stats().reads, 0);
}

TEST(RestingTest, PagesThatAreLostAreCountedAndNeverAskedForAgain) {
  RestingGroup group({.query_heads = 4, .kv_heads = 2, .head_dim = 64});
  ASSERT_TRUE(group->OpenAndRunPrompt(1, RecallSequence(100), TestTokens(0, 100)).ok());
  group.tier(0).loses = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  for (int64_t seen = 100; seen < 180; ++seen) {
    group.tier(0).bytes_to_rest = seen < 120 ? kEverything : 0;
    ASSERT_TRUE(group->Append({{1, TestTokens(0, 1, seen)}}).ok());
  }
  const RecallStats stats = group.recall(0).stats();
  EXPECT_GT(stats.pages_lost, 0);
  EXPECT_EQ(stats.pages_lost, group.tier(0).num_asked);
  EXPECT_EQ(stats.pages_asked, group.tier(0).num_asked);
  EXPECT_EQ(stats.pages_returned, 0);
  EXPECT_EQ(stats.pages_resting, group.tier(0).num_resting() - stats.pages_lost);
}

TEST(RestingTest, DecodeGoesOnWhereNothingThatIsAskedForComes) {
  RestingGroup group({.query_heads = 4, .kv_heads = 2, .head_dim = 64});
  ASSERT_TRUE(group->OpenAndRunPrompt(1, RecallSequence(100), TestTokens(0, 100)).ok());
  for (int64_t seen = 100; seen < 200; ++seen) {
    group.tier(0).bytes_to_rest = kEverything;
    ASSERT_TRUE(group->Append({{1, TestTokens(0, 1, seen)}}).ok());
  }
  const RecallStats stats = group.recall(0).stats();
  EXPECT_GT(stats.pages_asked, 0);
  EXPECT_LE(stats.pages_asked, stats.pages_resting) << "each once";
  EXPECT_EQ(stats.pages_resting, group.tier(0).num_resting());
  EXPECT_GT(stats.mass_missing, 0);
  // Full pages below the sketch's end, of 2 layers and 2 heads.
  EXPECT_GE(stats.pages_resting, 4 * (190 / 16));
}

TEST(RestingTest, WhatDoesNotComeInTimeIsMissedAndTheStepGoesOn) {
  RestingGroup group(
      {.query_heads = 4, .kv_heads = 2, .head_dim = 64, .max_recall_wait = absl::Milliseconds(5)});
  SequenceOptions sequence = RecallSequence(100);
  sequence.policy.recall.wait = true;
  ASSERT_TRUE(group->OpenAndRunPrompt(1, sequence, TestTokens(0, 100)).ok());
  for (int64_t seen = 100; seen < 140; ++seen) {
    group.tier(0).bytes_to_rest = seen < 120 ? kEverything : 0;
    ASSERT_TRUE(group->Append({{1, TestTokens(0, 1, seen)}}).ok()) << seen;
  }
  const RecallStats stats = group.Stats();
  EXPECT_GT(stats.missed_picks, 0);
  EXPECT_GT(group.tier(0).num_waits, 0);
  // It does not wait again before what it has asked for is there.
  EXPECT_LE(group.tier(0).num_waits, 10);
}

SequenceOptions WaitingSequence(Scope scope, int64_t plan_interval_steps) {
  SequenceOptions options = RecallSequence(100);
  options.policy.scope = scope;
  options.policy.plan_interval_steps = plan_interval_steps;
  options.policy.recall.wait = true;
  return options;
}

// What a plan would promote does not come, though picks' pages do: it is lost, or late.
class PlanWithoutItsPages {
 public:
  PlanWithoutItsPages(RestingGroup& group, int rank, bool lost)
      : group_(group), rank_(rank), lost_(lost) {
    Deliver();
    // Between the layers and the plans.
    group_->tamper = [this](std::vector<DeviceSpan<int64_t>>&) { Withhold(); };
  }
  void Deliver() {
    for (int rank = 0; rank < group_->world_size(); ++rank) {
      group_.tier(rank).comes_awaited = 1000;
      group_.tier(rank).Deliver(1000);
    }
    group_.tier(rank_).loses = {};
  }

 private:
  void Withhold() {
    group_.tier(rank_).comes_awaited = 0;
    for (int64_t page = 0; lost_ && page < 20; ++page) group_.tier(rank_).loses.insert(page);
  }

  RestingGroup& group_;
  const int rank_;
  const bool lost_;
};

TEST(RestingTest, AloneARankPlansWithoutWhatIsLostOrLate) {
  for (const bool lost : {false, true}) {
    for (const Scope scope : {Scope::kLayer, Scope::kKvHead}) {
      SCOPED_TRACE(std::string(ScopeName(scope)) + (lost ? " lost" : " late"));
      const int world_size = scope == Scope::kLayer ? 1 : 2;
      RestingGroup group({.world_size = world_size,
                          .query_heads = 4,
                          .kv_heads = 4,
                          .head_dim = 64,
                          .max_recall_wait = absl::Milliseconds(5)});
      const SequenceOptions options = WaitingSequence(scope, /*plan_interval_steps=*/2);
      ASSERT_TRUE(group->OpenAndRunPrompt(1, options, TestTokens(0, 100)).ok());
      PlanWithoutItsPages plans(group, world_size - 1, lost);
      SequenceRecall& recall = group.recall(world_size - 1);
      for (int64_t seen = 100; seen < 180;) {
        plans.Deliver();
        for (int rank = 0; rank < world_size; ++rank) {
          group.tier(rank).bytes_to_rest = seen % 3 == 0 ? kEverything : 0;
        }
        const std::vector<int32_t> tokens = TestTokens(0, seen % 4 == 0 ? 5 : 1, seen);
        const absl::Status status = group->Append({{1, tokens}});
        ASSERT_TRUE(status.ok()) << status << " at " << seen;
        seen += static_cast<int64_t>(tokens.size());
        for (const float value :
             group->Attention(0, tokens.back(), static_cast<Position>(seen - 1))) {
          ASSERT_TRUE(std::isfinite(value)) << "at " << seen;
        }
      }
      EXPECT_GT(lost ? recall.stats().pages_lost : recall.stats().waits_given_up, 0);
      EXPECT_GT(recall.stats().promoted, 0);
    }
  }
}

TEST(RestingTest, WhereRanksShareSetsTheSequenceEndsAloneAndRanksStayAlike) {
  for (const bool lost : {false, true}) {
    SCOPED_TRACE(lost ? "lost" : "late");
    RestingGroup group({.world_size = 2,
                        .query_heads = 4,
                        .kv_heads = 4,
                        .head_dim = 64,
                        .max_recall_wait = absl::Milliseconds(5)});
    SequenceOptions options = WaitingSequence(Scope::kLayer, /*plan_interval_steps=*/1);
    options.policy.recall.recall_tokens = 2;
    ASSERT_TRUE(group->OpenAndRunPrompt(1, options, TestTokens(0, 100)).ok());
    SequenceOptions other = options;
    other.policy.recall.wait = false;
    ASSERT_TRUE(group->OpenAndRunPrompt(2, other, TestTokens(0, 100)).ok());
    PlanWithoutItsPages plans(group, /*rank=*/1, lost);
    int64_t ended_at = 0;
    for (int64_t step = 0, seen = 100; seen < 180; ++step) {
      plans.Deliver();
      for (int rank = 0; rank < 2; ++rank) {
        group.tier(rank).bytes_to_rest = step % 3 == 0 ? kEverything : 0;
      }
      const std::vector<int32_t> tokens = TestTokens(0, step % 4 == 0 ? 5 : 2, seen);
      std::vector<TestAppend> appends = {{2, tokens}};
      if (ended_at == 0) appends.push_back({1, tokens});
      ASSERT_TRUE(group->RunStep(group->Describe(appends)).ok()) << "at " << seen;
      for (int rank = 0; rank < 2; ++rank) {
        ASSERT_TRUE(group->step(rank).item_status()[0].ok()) << "at " << seen;
        if (ended_at > 0) continue;
        const auto report = group->cache(rank).Report(1, /*with_sets=*/false);
        ASSERT_TRUE(report.ok());
        ASSERT_EQ(report->hash, group->cache(0).Report(1, /*with_sets=*/false)->hash);
      }
      const absl::Status own = ended_at == 0 ? group->step(0).item_status()[1] : absl::OkStatus();
      if (!own.ok()) {
        ended_at = seen;
        EXPECT_TRUE(absl::IsUnavailable(own)) << own;
        EXPECT_TRUE(absl::IsUnavailable(group->step(1).item_status()[1]));
      }
      seen += static_cast<int64_t>(tokens.size());
    }
    EXPECT_GT(ended_at, 0);
  }
}

TEST(RestingTest, AllSequencesOfAStepWaitNoLongerTogetherThanOne) {
  constexpr absl::Duration kBound = absl::Milliseconds(10);
  RestingGroup group({.query_heads = 4, .kv_heads = 2, .head_dim = 64, .max_recall_wait = kBound});
  std::vector<SequenceId> ids = {1, 2, 3, 4};
  for (const SequenceId id : ids) {
    const SequenceOptions options = WaitingSequence(Scope::kLayer, /*plan_interval_steps=*/4);
    ASSERT_TRUE(group->OpenAndRunPrompt(id, options, TestTokens(0, 100)).ok());
  }
  group.tier(0).takes_time = true;
  absl::Duration most;
  for (int64_t seen = 100; seen < 130; ++seen) {
    group.tier(0).bytes_to_rest = kEverything;
    group.tier(0).waited = absl::ZeroDuration();
    std::vector<TestAppend> appends;
    for (const SequenceId id : ids) appends.push_back({id, TestTokens(0, 1, seen)});
    ASSERT_TRUE(group->Append(appends).ok());
    most = std::max(most, group.tier(0).waited);
    group.tier(0).Deliver(1000);  // so that they wait again
  }
  EXPECT_GE(most, kBound);
  EXPECT_LE(most, 2 * kBound) << "once for picks, once for plans";
}

TEST(RestingTest, ItWaitsAgainOnceWhatItGaveUpOnHasCome) {
  RestingGroup group(
      {.query_heads = 4, .kv_heads = 2, .head_dim = 64, .max_recall_wait = absl::Milliseconds(5)});
  const SequenceOptions options = WaitingSequence(Scope::kLayer, /*plan_interval_steps=*/4);
  ASSERT_TRUE(group->OpenAndRunPrompt(1, options, TestTokens(0, 100)).ok());
  RestingHostTier& tier = group.tier(0);
  int64_t steps_with_others = 0;
  for (int64_t seen = 100; seen < 180; ++seen) {
    tier.Deliver(tier.num_on_their_way());
    tier.bytes_to_rest = kEverything;
    const int64_t given_up = group.recall(0).stats().waits_given_up;
    ASSERT_TRUE(group->Append({{1, TestTokens(0, 1, seen)}}).ok());
    if (group.recall(0).stats().waits_given_up == given_up) continue;
    // What this step has given up on comes; what the next one asks for does not.
    tier.Deliver(tier.num_on_their_way());
    const int64_t waits = tier.num_waits;
    ASSERT_TRUE(group->Append({{1, TestTokens(0, 1, ++seen)}}).ok());
    if (tier.num_waits > waits) ++steps_with_others;
  }
  EXPECT_GT(steps_with_others, 5);
}

TEST(RestingTest, NothingIsWaitedForWhereNothingRests) {
  RestingGroup group({.query_heads = 4, .kv_heads = 2, .head_dim = 64});
  SequenceOptions sequence = RecallSequence(100);
  sequence.policy.recall.wait = true;
  ASSERT_TRUE(group->OpenAndRunPrompt(1, sequence, TestTokens(0, 100)).ok());
  for (int64_t seen = 100; seen < 140; ++seen) {
    ASSERT_TRUE(group->Append({{1, TestTokens(0, 1, seen)}}).ok());
  }
  EXPECT_GT(group.Stats().reads, 0);
  EXPECT_EQ(group.tier(0).num_waits, 0);
  EXPECT_EQ(group.tier(0).num_asked, 0);
}

TEST(RestingTest, NothingRestsWithoutTheOptionOrInModeAll) {
  for (const bool all : {false, true}) {
    RestingHostTier tier;
    TestGroupOptions options{.query_heads = 4, .kv_heads = 2, .head_dim = 64};
    options.tiers = {&tier};
    options.rest_pages = all;
    TestGroup group(options);
    SequenceOptions sequence = RecallSequence(100);
    sequence.policy.recall.all = all;
    ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 100)).ok());
    tier.bytes_to_rest = kEverything;
    for (int64_t seen = 100; seen < 140; ++seen) {
      ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, seen)}}).ok());
    }
    EXPECT_EQ(tier.num_resting(), 0);
  }
}

}  // namespace
}  // namespace heavywater
