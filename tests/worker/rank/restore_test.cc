// A sequence that begins in a snapshot goes on exactly as the one that it was taken
// of: the same residents in the same slots, the same scores, the same attention, bit for bit.
#include <algorithm>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/keeping_tier.h"
#include "tests/worker/rank/test_group.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr SequenceId kSequence = 5;

int Pick(std::mt19937& random, std::initializer_list<int> choices) {
  return choices.begin()[random() % choices.size()];
}

class RestoreCase {
 public:
  explicit RestoreCase(uint32_t seed) : random_(seed) {
    options_.world_size = Pick(random_, {1, 2, 3});
    options_.kv_heads = options_.world_size * Pick(random_, {1, 2});
    options_.query_heads = options_.kv_heads * Pick(random_, {1, 3});
    options_.head_dim = Pick(random_, {16, 64});
    options_.dtype = kKvDtypes[random_() % 3];
    options_.cpu_backend = random_() % 2 == 0;
    options_.seed = random_();
    for (int rank = 0; rank < options_.world_size; ++rank) {
      tiers_.push_back(std::make_unique<KeepingTier>());
      options_.tiers.push_back(tiers_.back().get());
    }
    const Policy policies[] = {Policy::kSnapKvH2o, Policy::kH2o,  Policy::kStreaming,
                               Policy::kSnapKv,    Policy::kFull, Policy::kPyramidKv};
    const Policy policy = policies[random_() % 6];
    const Scope scope = random_() % 2 == 0 ? Scope::kLayer : Scope::kKvHead;
    sequence_ = TestSequence(policy, scope, Pick(random_, {6, 20}), Pick(random_, {3, 12}),
                             Pick(random_, {9, 40, 75}), 96);
    sequence_.policy.window = 8;
    sequence_.policy.plan_interval_steps = Pick(random_, {1, 3, 16});
    sequence_.policy.decay = random_() % 2 == 0 ? 1.0 : 0.9;
    sequence_.policy.recall.enabled = policy != Policy::kFull && random_() % 3 != 0;
    if (!sequence_.policy.recall.enabled && random_() % 2 == 0) {
      options_.rope_frequencies = TestRopeFrequencies(options_.head_dim);
      sequence_.policy.positions = Positions::kCacheRelative;
    }
    const bool scores = policy != Policy::kFull && policy != Policy::kStreaming;
    const bool can_divide = scores && scope == Scope::kKvHead && !sequence_.policy.recall.enabled &&
                            sequence_.policy.positions == Positions::kAbsolute;
    divided = can_divide;
    if (can_divide) sequence_.policy.head_budgets = HeadBudgets::kAdaptive;
    sequence_.policy.recall.recall_tokens = Pick(random_, {2, 16});
    sequence_.policy.recall.promote_candidates = Pick(random_, {0, 4});
    tokens_ = TestTokens(1, sequence_.prompt_tokens + 80);
  }

  // One token at a time; the state is taken where it can be, at one of those places.
  void Run() {
    TestGroup undisturbed(options_);
    const std::vector<int32_t> prompt(tokens_.begin(), tokens_.begin() + sequence_.prompt_tokens);
    ASSERT_TRUE(undisturbed.OpenAndRunPrompt(kSequence, sequence_, prompt).ok());
    const auto wanted = static_cast<int64_t>(random_() % 60);
    std::vector<SequenceSnapshot> snapshots;
    for (int64_t i = 0; i < 80; ++i) {
      if (snapshots.empty() && i >= wanted && Cache(undisturbed, 0).CanSnapshot()) {
        snapshots = TakeAll(undisturbed);
      }
      ASSERT_TRUE(Append(undisturbed, sequence_.prompt_tokens + i).ok());
    }
    if (snapshots.empty()) return;  // recall without plans: only at the prompt's end
    ++restored;
    const auto pages = PagesOfAll();
    // What came after the snapshot is replayed by other processes.
    TestGroup other(options_);
    for (int rank = 0; rank < options_.world_size; ++rank) {
      const absl::Status status = other.cache(rank).Restore(
          kSequence, sequence_, snapshots[static_cast<size_t>(rank)], known_tokens());
      ASSERT_TRUE(status.ok()) << status;
    }
    for (int64_t position = snapshots[0].tokens_seen; position < known_tokens(); ++position) {
      ASSERT_TRUE(Append(other, position).ok());
      ExpectSameAttention(undisturbed, other, position);
    }
    for (int rank = 0; rank < options_.world_size; ++rank) {
      EXPECT_EQ(Cache(other, rank).hash().placement, Cache(undisturbed, rank).hash().placement);
    }
    for (int layer = 0; layer < options_.num_layers; ++layer) {
      EXPECT_EQ(other.Sets(kSequence, layer), undisturbed.Sets(kSequence, layer));
    }
    ExpectSameStats(undisturbed, other);
    for (size_t rank = 0; rank < pages.size(); ++rank) {
      for (const auto& [key, bytes] : pages[rank]) EXPECT_EQ(tiers_[rank]->pages().at(key), bytes);
    }
  }

  // The sequence goes back to some token at or behind the snapshot and on with others: as one
  // that never saw what came there.
  void RunBack() {
    TestGroup gone(options_);
    const std::vector<int32_t> prompt(tokens_.begin(), tokens_.begin() + sequence_.prompt_tokens);
    ASSERT_TRUE(gone.OpenAndRunPrompt(kSequence, sequence_, prompt).ok());
    const auto wanted = static_cast<int64_t>(random_() % 60);
    std::vector<SequenceSnapshot> snapshots;
    for (int64_t position = sequence_.prompt_tokens; position < known_tokens(); ++position) {
      const bool due = snapshots.empty() && position >= sequence_.prompt_tokens + wanted;
      if (due && Cache(gone, 0).CanSnapshot()) snapshots = TakeAll(gone);
      ASSERT_TRUE(Append(gone, position).ok());
    }
    if (snapshots.empty()) return;
    ++restored;
    const int64_t seen = snapshots[0].tokens_seen;
    const int64_t kept = seen + static_cast<int64_t>(random_() % 30);
    const std::vector<int32_t> others = TestTokens(2, known_tokens());
    std::copy(others.begin() + kept, others.end(), tokens_.begin() + kept);
    TestGroup back(options_);
    for (int rank = 0; rank < options_.world_size; ++rank) {
      tiers_[static_cast<size_t>(rank)]->stored = kept;
      const absl::Status status = back.cache(rank).Restore(
          kSequence, sequence_, snapshots[static_cast<size_t>(rank)], kept);
      ASSERT_TRUE(status.ok()) << status;
    }
    ExpectGoesOnAsOneThatNeverSawMore(back, prompt, seen);
  }

  int restored = 0;
  bool divided = false;  // among KV heads, by scores

 private:
  void ExpectGoesOnAsOneThatNeverSawMore(TestGroup& back, const std::vector<int32_t>& prompt,
                                         int64_t seen) {
    TestGroupOptions options = options_;
    std::vector<std::unique_ptr<KeepingTier>> tiers;
    for (HostTier*& tier : options.tiers) {
      tiers.push_back(std::make_unique<KeepingTier>());
      tier = tiers.back().get();
    }
    TestGroup never(options);
    ASSERT_TRUE(never.OpenAndRunPrompt(kSequence, sequence_, prompt).ok());
    for (int64_t position = sequence_.prompt_tokens; position < known_tokens(); ++position) {
      ASSERT_TRUE(Append(never, position).ok());
      if (position < seen) continue;
      ASSERT_TRUE(Append(back, position).ok());
      ExpectSameAttention(never, back, position);
    }
    for (int layer = 0; layer < options_.num_layers; ++layer) {
      EXPECT_EQ(back.Sets(kSequence, layer), never.Sets(kSequence, layer));
    }
    ExpectSameStats(never, back);
    for (size_t rank = 0; rank < tiers.size(); ++rank) {
      for (const auto& [key, bytes] : tiers[rank]->pages()) {
        EXPECT_EQ(tiers_[rank]->pages().at(key), bytes);
      }
    }
  }
  int64_t known_tokens() const { return sequence_.prompt_tokens + 80; }
  static SequenceCache& Cache(TestGroup& group, int rank) {
    return **group.cache(rank).Find(kSequence);
  }
  absl::Status Append(TestGroup& group, int64_t position) {
    return group.Append({{kSequence, {tokens_[static_cast<size_t>(position)]}}});
  }
  std::vector<SequenceSnapshot> TakeAll(TestGroup& group) {
    std::vector<SequenceSnapshot> snapshots;
    for (int rank = 0; rank < options_.world_size; ++rank) {
      auto snapshot = Cache(group, rank).Snapshot(/*with_slots=*/true);
      EXPECT_TRUE(snapshot.ok()) << snapshot.status();
      snapshots.push_back(*std::move(snapshot));
    }
    return snapshots;
  }
  std::vector<std::map<std::tuple<int, int, int64_t>, std::vector<std::byte>>> PagesOfAll() const {
    std::vector<std::map<std::tuple<int, int, int64_t>, std::vector<std::byte>>> all;
    for (const auto& tier : tiers_) all.push_back(tier->pages());
    return all;
  }
  void ExpectSameAttention(TestGroup& a, TestGroup& b, int64_t position) {
    const int32_t token = tokens_[static_cast<size_t>(position)];
    for (int layer = 0; layer < options_.num_layers; ++layer) {
      ASSERT_EQ(b.Attention(layer, token, static_cast<Position>(position)),
                a.Attention(layer, token, static_cast<Position>(position)))
          << "layer " << layer << ", position " << position;
    }
  }
  void ExpectSameStats(TestGroup& a, TestGroup& b) {
    const SequenceStats want = *a.cache().Stats(kSequence);
    const SequenceStats got = *b.cache().Stats(kSequence);
    EXPECT_EQ(got.plans, want.plans);
    EXPECT_EQ(got.tokens_resident, want.tokens_resident);
    EXPECT_EQ(got.tokens_demoted, want.tokens_demoted);
    EXPECT_EQ(got.recall_queries, want.recall_queries);
    EXPECT_EQ(got.recall_reads, want.recall_reads);
    EXPECT_EQ(got.promoted, want.promoted);
    EXPECT_EQ(got.device_bytes, want.device_bytes);
  }

  std::mt19937 random_;
  TestGroupOptions options_;
  std::vector<std::unique_ptr<KeepingTier>> tiers_;
  SequenceOptions sequence_;
  std::vector<int32_t> tokens_;
};

TEST(RestoreTest, TheRestIsTheSameBitForBit) {
  int restored = 0;
  int divided = 0;
  for (uint32_t seed = 1; seed <= 90; ++seed) {
    SCOPED_TRACE(seed);
    RestoreCase one(seed);
    one.Run();
    restored += one.restored;
    divided += one.divided ? one.restored : 0;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(restored, 65);
  EXPECT_GT(divided, 3);
}

TEST(RestoreTest, OneThatGoesBackAndOnOtherwiseIsAsIfItHadNeverGoneFurther) {
  int restored = 0;
  for (uint32_t seed = 1; seed <= 60; ++seed) {
    SCOPED_TRACE(seed);
    RestoreCase one(seed);
    one.RunBack();
    restored += one.restored;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(restored, 45);
}

class RestoreRefusalTest : public ::testing::Test {
 protected:
  RestoreRefusalTest() {
    options_.tiers = {&tier_};
    Take(TestSequence(Policy::kSnapKvH2o, Scope::kLayer, 8, 8, 40));
  }
  // The state at the end of the sequence's prompt.
  void Take(const SequenceOptions& sequence) {
    sequence_ = sequence;
    group_ = std::make_unique<TestGroup>(options_);
    EXPECT_TRUE(group_->OpenAndRunPrompt(kSequence, sequence_, TestTokens(1, 40)).ok());
    auto snapshot = (*group_->cache().Find(kSequence))->Snapshot(true);
    EXPECT_TRUE(snapshot.ok());
    snapshot_ = *std::move(snapshot);
    EXPECT_TRUE(group_->Close(kSequence).ok());
  }
  absl::Status Restore() { return group_->cache().Restore(kSequence, sequence_, snapshot_, 40); }

  KeepingTier tier_;
  TestGroupOptions options_;
  SequenceOptions sequence_;
  std::unique_ptr<TestGroup> group_;
  SequenceSnapshot snapshot_;
};

TEST_F(RestoreRefusalTest, PagesThatAreNotThereAreNamedAndNothingStaysOpen) {
  tier_.stored = 39;
  const absl::Status status = Restore();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("hold 39 tokens"));
  EXPECT_EQ(group_->cache().num_sequences(), 0);
  tier_.stored = 40;
  EXPECT_TRUE(Restore().ok());
}

// Rows that are known are not written again: their pages must be there from the start.
TEST_F(RestoreRefusalTest, AllPagesOfKnownRowsAreTakenOverOrNone) {
  options_.reserve_ahead_tokens = 0;
  Take(TestSequence(Policy::kSnapKvH2o, Scope::kLayer, 8, 8, 40));
  tier_.stored = 60;  // of a life that went on after the state
  tier_.reserved_pages = 0;
  ASSERT_TRUE(group_->cache().Restore(kSequence, sequence_, snapshot_, 55).ok());
  EXPECT_EQ(tier_.reserved_pages, 4);
  ASSERT_TRUE(group_->Close(kSequence).ok());
  tier_.stored = 60;
  tier_.reserved_pages = 0;
  tier_.pages_to_take_over = 3;
  const absl::Status status = group_->cache().Restore(kSequence, sequence_, snapshot_, 55);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(group_->cache().num_sequences(), 0);
}

TEST_F(RestoreRefusalTest, MoreSlotsThanTokensAreDataLossWithoutABudget) {
  Take(TestSequence(Policy::kFull, Scope::kLayer, 8, 8, 40));
  EXPECT_TRUE(Restore().ok());
  EXPECT_TRUE(group_->Close(kSequence).ok());
  for (SlotSnapshot& slots : snapshot_.slots) {
    slots.positions.resize(41, kNoPosition);
    if (!slots.scores.empty()) slots.scores.resize(41);
  }
  EXPECT_EQ(Restore().code(), absl::StatusCode::kDataLoss);
}

TEST_F(RestoreRefusalTest, AKvHeadWithMoreThanTheLayersSlotsIsDataLoss) {
  SequenceOptions divided = TestSequence(Policy::kSnapKvH2o, Scope::kKvHead, 8, 4, 40);
  divided.policy.head_budgets = HeadBudgets::kAdaptive;
  divided.policy.window = 4;
  Take(divided);
  EXPECT_TRUE(Restore().ok());
  EXPECT_TRUE(group_->Close(kSequence).ok());
  // Both heads hold what one alone might.
  for (int head = 0; head < 2; ++head) {
    SlotSnapshot& slots = snapshot_.slots[static_cast<size_t>(head)];
    slots.scores.clear();
    slots.positions.resize(18);
    for (int i = 0; i < 18; ++i) slots.positions[static_cast<size_t>(i)] = i;
  }
  const absl::Status status = Restore();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("positions of a KV head is 18, want 6"));
}

TEST_F(RestoreRefusalTest, ALedgerOfAnImpossibleSizeIsDataLoss) {
  options_.kv_heads = options_.query_heads = 4;
  SequenceOptions recalls = TestSequence(Policy::kSnapKvH2o, Scope::kKvHead, 8, 8, 40);
  recalls.policy.recall.enabled = true;
  Take(recalls);
  ASSERT_TRUE(snapshot_.recall.has_value());
  LedgerSnapshot& ledger = snapshot_.recall->ledgers[0];
  ledger.scores.clear();
  ledger.clocks.clear();
  ledger.stride = int64_t{1} << 62;  // times four sets: 0 in 64 bits
  EXPECT_EQ(Restore().code(), absl::StatusCode::kDataLoss);
}

TEST_F(RestoreRefusalTest, ASnapshotThatDoesNotFitIsDataLoss) {
  const SequenceSnapshot good = snapshot_;
  snapshot_.slots.pop_back();
  EXPECT_EQ(Restore().code(), absl::StatusCode::kDataLoss);
  snapshot_ = good;
  snapshot_.slots[0].positions[0] = 40;  // not seen
  EXPECT_EQ(Restore().code(), absl::StatusCode::kDataLoss);
  snapshot_ = good;
  snapshot_.slots[1].positions[0] = snapshot_.slots[1].positions[1];
  EXPECT_EQ(Restore().code(), absl::StatusCode::kDataLoss);
  snapshot_ = good;
  snapshot_.slots[1].scores.pop_back();
  EXPECT_EQ(Restore().code(), absl::StatusCode::kDataLoss);
  snapshot_ = good;
  EXPECT_TRUE(Restore().ok());
}

}  // namespace
}  // namespace heavywater
