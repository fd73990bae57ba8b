// A copy of a sequence goes on as the sequence would have, whatever becomes of the other; one
// that goes back goes on as if it had never gone further.
#include <memory>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "cache_service/tier/local_host_tier.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/test_group.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr SequenceId kSequence = 5;
constexpr SequenceId kCopy = 9;
constexpr int64_t kMore = 60;

int Pick(std::mt19937& random, std::initializer_list<int> choices) {
  return choices.begin()[random() % choices.size()];
}

// A group with host memory of its own.
struct GroupWithTiers {
  explicit GroupWithTiers(TestGroupOptions options) {
    for (int rank = 0; rank < options.world_size; ++rank) {
      tiers.push_back(std::make_unique<LocalHostTier>(int64_t{1} << 26));
      options.tiers.push_back(tiers.back().get());
    }
    group = std::make_unique<TestGroup>(options);
  }
  absl::Status Append(SequenceId sequence, const std::vector<int32_t>& tokens, int64_t position,
                      int64_t count = 1) {
    const auto first = tokens.begin() + position;
    return group->Append({{sequence, {first, first + count}}});
  }

  std::vector<std::unique_ptr<LocalHostTier>> tiers;
  std::unique_ptr<TestGroup> group;
};

class ForkCase {
 public:
  explicit ForkCase(uint32_t seed) : random_(seed) {
    options_.world_size = Pick(random_, {1, 2});
    options_.kv_heads = options_.world_size * Pick(random_, {1, 2});
    options_.query_heads = options_.kv_heads * Pick(random_, {1, 3});
    options_.head_dim = Pick(random_, {16, 64});
    options_.dtype = kKvDtypes[random_() % 3];
    options_.cpu_backend = random_() % 2 == 0;
    options_.seed = random_();
    const Policy policies[] = {Policy::kSnapKvH2o,    Policy::kH2o,  Policy::kStreaming,
                               Policy::kScissorhands, Policy::kFull, Policy::kPyramidKv};
    const Policy policy = policies[random_() % 6];
    const Scope scope = random_() % 2 == 0 ? Scope::kLayer : Scope::kKvHead;
    sequence_ = TestSequence(policy, scope, Pick(random_, {6, 20}), Pick(random_, {3, 12}),
                             Pick(random_, {9, 40, 75}), 2 * kMore);
    sequence_.policy.window = 8;
    sequence_.policy.plan_interval_steps = Pick(random_, {1, 3, 16});
    const bool can_recall = policy != Policy::kFull && policy != Policy::kScissorhands;
    sequence_.policy.recall.enabled = can_recall && random_() % 3 != 0;
    sequence_.policy.recall.recall_tokens = Pick(random_, {2, 16});
    sequence_.policy.recall.promote_candidates = Pick(random_, {0, 4});
    tokens_ = TestTokens(1, sequence_.prompt_tokens + 2 * kMore);
    others_ = TestTokens(2, sequence_.prompt_tokens + 2 * kMore);
    prompt_.assign(tokens_.begin(), tokens_.begin() + sequence_.prompt_tokens);
    forked_at_ = sequence_.prompt_tokens + static_cast<int64_t>(random_() % kMore);
  }

  // A copy in the same cache, or one in another group that is given the saved state.
  void Run(bool by_state) {
    GroupWithTiers never(options_);
    GroupWithTiers here(options_);
    GroupWithTiers there(options_);
    for (GroupWithTiers* one : {&never, &here}) {
      ASSERT_TRUE(one->group->OpenAndRunPrompt(kSequence, sequence_, prompt_).ok());
      for (int64_t at = sequence_.prompt_tokens; at < forked_at_; ++at) {
        ASSERT_TRUE(one->Append(kSequence, tokens_, at).ok());
      }
    }
    between_plans = (**here.group->cache().Find(kSequence)).queries_since_plan() > 0;
    for (int rank = 0; rank < options_.world_size; ++rank) {
      RankCache& cache = here.group->cache(rank);
      const absl::Status copied =
          by_state ? Load(cache, there.group->cache(rank)) : cache.Fork(kCopy, cache, kSequence);
      if (by_state && sequence_.policy.policy == Policy::kScissorhands) {
        EXPECT_EQ(copied.code(), absl::StatusCode::kFailedPrecondition);
        return;
      }
      ASSERT_TRUE(copied.ok()) << copied;
    }
    EXPECT_EQ(there.group->cache().Fork(77, here.group->cache(), kSequence).code(),
              absl::StatusCode::kInvalidArgument);  // of another backend
    ++forked;
    ExpectGoesOn(never, here, by_state ? there : here);
  }

  // Bytes that are not the state's are refused and leave nothing open, whatever they are.
  void RunDamaged() {
    GroupWithTiers here(options_);
    ASSERT_TRUE(here.group->OpenAndRunPrompt(kSequence, sequence_, prompt_).ok());
    RankCache& cache = here.group->cache();
    const auto saved = (**cache.Find(kSequence)).SaveState();
    if (!saved.ok()) return;
    ++forked;
    const int64_t seen = sequence_.prompt_tokens;
    const std::vector<std::vector<std::byte>> pages = PagesOf(cache, seen);
    const std::vector<std::span<const std::byte>> spans(pages.begin(), pages.end());
    for (int i = 0; i < 20; ++i) {
      const std::span<const std::byte> cut(saved->data(), random_() % saved->size());
      EXPECT_EQ(cache.LoadState(kCopy, sequence_, cut, spans, seen).code(),
                absl::StatusCode::kDataLoss);
      std::vector<std::byte> bent = *saved;
      bent[random_() % bent.size()] ^= std::byte{0xff};
      if (cache.LoadState(kCopy, sequence_, bent, spans, seen).ok()) {
        EXPECT_TRUE(cache.Close(kCopy).ok());
      }
      EXPECT_EQ(cache.num_sequences(), 1);
    }
    EXPECT_TRUE(cache.LoadState(kCopy, sequence_, *saved, spans, seen).ok());
    EXPECT_EQ(cache.LoadState(77, sequence_, *saved, spans, seen - 1).code(),
              absl::StatusCode::kInvalidArgument);
  }

  int forked = 0;
  bool between_plans = false;

 private:
  std::vector<std::vector<std::byte>> PagesOf(RankCache& cache, int64_t tokens) const {
    std::vector<std::vector<std::byte>> pages;
    if (!sequence_.policy.recall.enabled) return pages;
    for (int64_t page = 0; page * options_.page_tokens < tokens; ++page) {
      pages.push_back((**cache.Find(kSequence)).host_pages().ReadPage(page));
    }
    return pages;
  }
  absl::Status Load(RankCache& from, RankCache& to) const {
    const auto state = (**from.Find(kSequence)).SaveState();
    if (!state.ok()) return state.status();
    const std::vector<std::vector<std::byte>> pages = PagesOf(from, forked_at_);
    const std::vector<std::span<const std::byte>> spans(pages.begin(), pages.end());
    return to.LoadState(kCopy, sequence_, *state, spans, forked_at_);
  }

  // The copy takes in what `never` does; the original, meanwhile, other tokens, and ends.
  void ExpectGoesOn(GroupWithTiers& never, GroupWithTiers& here, GroupWithTiers& there) {
    for (int64_t at = forked_at_; at < forked_at_ + kMore; ++at) {
      if (at < forked_at_ + 20) {
        ASSERT_TRUE(here.Append(kSequence, others_, at).ok());
      }
      if (at == forked_at_ + 20) {
        ASSERT_TRUE(here.group->Close(kSequence).ok());
      }
      ASSERT_TRUE(never.Append(kSequence, tokens_, at).ok());
      ASSERT_TRUE(there.Append(kCopy, tokens_, at).ok());
      for (int layer = 0; layer < options_.num_layers; ++layer) {
        const int32_t token = tokens_[static_cast<size_t>(at)];
        ASSERT_EQ(there.group->Attention(layer, token, static_cast<Position>(at)),
                  never.group->Attention(layer, token, static_cast<Position>(at)))
            << "layer " << layer << ", position " << at;
      }
    }
    for (int layer = 0; layer < options_.num_layers; ++layer) {
      EXPECT_EQ(there.group->Sets(kCopy, layer), never.group->Sets(kSequence, layer));
    }
    const SequenceStats want = *never.group->cache().Stats(kSequence);
    const SequenceStats got = *there.group->cache().Stats(kCopy);
    EXPECT_EQ(got.plans, want.plans);
    EXPECT_EQ(got.tokens_demoted, want.tokens_demoted);
    EXPECT_EQ(got.recall_reads, want.recall_reads);
    EXPECT_EQ(got.promoted, want.promoted);
    EXPECT_EQ(got.device_bytes, want.device_bytes);
  }

  std::mt19937 random_;
  TestGroupOptions options_;
  SequenceOptions sequence_;
  std::vector<int32_t> tokens_, others_, prompt_;
  int64_t forked_at_ = 0;
};

TEST(ForkTest, ACopyGoesOnBitForBitWhateverBecomesOfTheOther) {
  int forked = 0;
  int between_plans = 0;
  for (uint32_t seed = 1; seed <= 90; ++seed) {
    SCOPED_TRACE(seed);
    ForkCase one(seed);
    one.Run(/*by_state=*/false);
    forked += one.forked;
    between_plans += one.between_plans ? one.forked : 0;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_EQ(forked, 90);
  EXPECT_GT(between_plans, 20);
}

TEST(ForkTest, ASavedStateGoesOnBitForBitElsewhere) {
  int loaded = 0;
  int between_plans = 0;
  for (uint32_t seed = 1; seed <= 90; ++seed) {
    SCOPED_TRACE(seed);
    ForkCase one(seed);
    one.Run(/*by_state=*/true);
    loaded += one.forked;
    between_plans += one.between_plans ? one.forked : 0;
    if (::testing::Test::HasFailure()) return;
  }
  EXPECT_GT(loaded, 60);
  EXPECT_GT(between_plans, 20);
}

TEST(ForkTest, ADamagedStateIsRefusedAndNothingStaysOpen) {
  int tried = 0;
  for (uint32_t seed = 1; seed <= 30; ++seed) {
    SCOPED_TRACE(seed);
    ForkCase one(seed);
    one.RunDamaged();
    tried += one.forked;
  }
  EXPECT_GT(tried, 15);
}

class TruncateTest : public ::testing::Test {
 protected:
  absl::Status Run(Policy policy, GroupWithTiers& group, const std::vector<int32_t>& prompt) {
    return group.group->OpenAndRunPrompt(
        kSequence,
        TestSequence(policy, Scope::kLayer, 4, 4, static_cast<int64_t>(prompt.size()), 100),
        prompt);
  }
  SequenceCache& Cache(GroupWithTiers& group) { return **group.group->cache().Find(kSequence); }

  TestGroupOptions options_;
  const std::vector<int32_t> tokens_ = TestTokens(1, 120);
  const std::vector<int32_t> others_ = TestTokens(2, 120);
};

TEST_F(TruncateTest, AFullCacheGoesBackToAnyTokenAlsoOfItsPrompt) {
  for (const int64_t kept : {1, 17, 40, 41, 55, 70}) {
    GroupWithTiers back(options_);
    GroupWithTiers never(options_);
    ASSERT_TRUE(Run(Policy::kFull, back, {tokens_.begin(), tokens_.begin() + 40}).ok());
    for (int64_t at = 40; at < 70; ++at) ASSERT_TRUE(back.Append(kSequence, tokens_, at).ok());
    ASSERT_TRUE(Cache(back).Truncate(kept).ok());
    EXPECT_EQ(Cache(back).tokens_seen(), kept);
    EXPECT_EQ(back.group->cache().Stats(kSequence)->tokens_resident, kept);
    ASSERT_TRUE(Run(Policy::kFull, never, {tokens_.begin(), tokens_.begin() + kept}).ok());
    for (int64_t at = kept; at < kept + 30; ++at) {
      ASSERT_TRUE(back.Append(kSequence, others_, at).ok());
      ASSERT_TRUE(never.Append(kSequence, others_, at).ok());
      const int32_t token = others_[static_cast<size_t>(at)];
      ASSERT_EQ(back.group->Attention(1, token, static_cast<Position>(at)),
                never.group->Attention(1, token, static_cast<Position>(at)));
    }
    EXPECT_EQ(back.group->Sets(kSequence, 0), never.group->Sets(kSequence, 0));
    EXPECT_EQ(Cache(back).hash().placement, Cache(never).hash().placement);
    EXPECT_EQ(Cache(back).used(), Cache(never).used());
  }
}

TEST_F(TruncateTest, ACacheThatForgetsCannotGoBack) {
  GroupWithTiers group(options_);
  ASSERT_TRUE(Run(Policy::kH2o, group, {tokens_.begin(), tokens_.begin() + 40}).ok());
  const absl::Status status = Cache(group).Truncate(39);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("policy h2o forgets"));
}

TEST_F(TruncateTest, TokensThatAreNotThereAreRefused) {
  GroupWithTiers group(options_);
  ASSERT_TRUE(Run(Policy::kFull, group, {tokens_.begin(), tokens_.begin() + 40}).ok());
  for (const int64_t tokens : {0, 41}) {
    EXPECT_EQ(Cache(group).Truncate(tokens).code(), absl::StatusCode::kOutOfRange);
  }
}

TEST_F(TruncateTest, APromptThatHasNotEndedCannotBeCopied) {
  TestGroup group(options_);
  ASSERT_TRUE(group.Open(kSequence, TestSequence(Policy::kH2o, Scope::kLayer, 4, 4, 40)).ok());
  const absl::Status status = group.cache().Fork(kCopy, group.cache(), kSequence);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(group.cache().Fork(kCopy, group.cache(), 77).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(group.cache().num_sequences(), 1);
}

}  // namespace
}  // namespace heavywater
