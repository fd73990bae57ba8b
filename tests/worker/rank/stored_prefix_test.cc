// A prompt that begins with stored pages ends as one that was computed whole: the same
// positions kept, the same scores, the same attention after it.
#include "worker/rank/stored_prefix.h"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <random>
#include <string>
#include <utility>
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
constexpr int64_t kPage = 16;

int Pick(std::mt19937& random, std::initializer_list<int> choices) {
  return choices.begin()[random() % choices.size()];
}

class StoredPrefixCase {
 public:
  explicit StoredPrefixCase(uint32_t seed) : random_(seed) {
    options_.world_size = Pick(random_, {1, 2, 3});
    options_.kv_heads = options_.world_size * Pick(random_, {1, 2});
    options_.query_heads = options_.kv_heads * Pick(random_, {1, 3});
    options_.head_dim = Pick(random_, {16, 64});
    options_.dtype = kKvDtypes[random_() % 3];
    options_.cpu_backend = random_() % 2 == 0;
    options_.max_step_tokens = Pick(random_, {16, 64});
    options_.seed = random_();
    const Policy policies[] = {Policy::kSnapKvH2o, Policy::kStreaming, Policy::kSnapKv,
                               Policy::kFull, Policy::kPyramidKv};
    const Policy policy = policies[random_() % 5];
    const Scope scope = random_() % 2 == 0 ? Scope::kLayer : Scope::kKvHead;
    sequence_ = TestSequence(policy, scope, Pick(random_, {6, 20}), Pick(random_, {3, 12}),
                             Pick(random_, {65, 96, 131}), 96);
    sequence_.policy.window = 8;
    sequence_.policy.recall.enabled = policy != Policy::kFull && random_() % 2 != 0;
    const bool scores = policy != Policy::kFull && policy != Policy::kStreaming;
    if (!sequence_.policy.recall.enabled && random_() % 2 == 0) {
      options_.rope_frequencies = TestRopeFrequencies(options_.head_dim);
      sequence_.policy.positions = Positions::kCacheRelative;
    } else if (scores && scope == Scope::kKvHead && !sequence_.policy.recall.enabled) {
      sequence_.policy.head_budgets = HeadBudgets::kAdaptive;
    }
    tokens_ = TestTokens(1, sequence_.prompt_tokens + kLater);
  }

  void Run() {
    std::vector<std::unique_ptr<KeepingTier>> whole_tiers = MakeTiers();
    TestGroup whole(options_);
    ASSERT_TRUE(whole.OpenAndRunPrompt(kSequence, sequence_, Prompt()).ok());
    const int64_t most = MostStoredTokens(Cache(whole).budget(), sequence_) / kPage;
    ASSERT_GT(most, 0);
    SequenceOptions begun_options = sequence_;
    begun_options.stored_tokens = kPage * (1 + static_cast<int64_t>(random_() % most));
    // Only those pages, as another sequence holds them.
    std::vector<std::unique_ptr<KeepingTier>> tiers = MakeTiers();
    for (size_t rank = 0; rank < tiers.size(); ++rank) {
      KeepingTier::Pages pages;
      for (const auto& [key, bytes] : whole_tiers[rank]->pages()) {
        if (std::get<2>(key) * kPage < begun_options.stored_tokens) pages[key] = bytes;
      }
      tiers[rank]->set_pages(std::move(pages));
      tiers[rank]->stored = begun_options.stored_tokens;
    }
    TestGroup begun(options_);
    ASSERT_TRUE(begun.OpenAndRunPrompt(kSequence, begun_options, Prompt()).ok());
    ExpectSame(whole, begun);
    for (int64_t position = sequence_.prompt_tokens; position < sequence_.prompt_tokens + kLater;
         ++position) {
      const int32_t token = tokens_[static_cast<size_t>(position)];
      ASSERT_TRUE(whole.Append({{kSequence, {token}}}).ok());
      ASSERT_TRUE(begun.Append({{kSequence, {token}}}).ok());
      for (int layer = 0; layer < options_.num_layers; ++layer) {
        ASSERT_EQ(begun.Attention(layer, token, static_cast<Position>(position)),
                  whole.Attention(layer, token, static_cast<Position>(position)))
            << "layer " << layer << ", position " << position;
      }
    }
    ExpectSame(whole, begun);
    for (size_t rank = 0; rank < tiers.size(); ++rank) {
      ExpectSamePages(tiers[rank]->pages(), whole_tiers[rank]->pages());
    }
  }

 private:
  static constexpr int64_t kLater = 20;

  // Of all positions. Pages that are there ahead of need hold none.
  void ExpectSamePages(const KeepingTier::Pages& got, const KeepingTier::Pages& want) const {
    const int64_t tokens = sequence_.prompt_tokens + kLater;
    const auto rows = [&](const std::vector<std::byte>& page, int64_t number) {
      const auto row_bytes = static_cast<int64_t>(page.size()) / kPage;
      const int64_t held = std::min(kPage, tokens - number * kPage);
      return std::vector<std::byte>(page.begin(), page.begin() + held * row_bytes);
    };
    for (const auto& [key, page] : want) {
      const auto [layer, head, number] = key;
      if (number * kPage >= tokens) continue;
      const auto found = got.find(key);
      ASSERT_NE(found, got.end()) << "page " << number << " of layer " << layer;
      EXPECT_TRUE(rows(found->second, number) == rows(page, number))
          << "page " << number << " of layer " << layer << ", KV head " << head;
    }
  }

  std::vector<std::unique_ptr<KeepingTier>> MakeTiers() {
    std::vector<std::unique_ptr<KeepingTier>> tiers;
    options_.tiers.clear();
    for (int rank = 0; rank < options_.world_size; ++rank) {
      tiers.push_back(std::make_unique<KeepingTier>());
      options_.tiers.push_back(tiers.back().get());
    }
    return tiers;
  }
  std::vector<int32_t> Prompt() const {
    return {tokens_.begin(), tokens_.begin() + sequence_.prompt_tokens};
  }
  static SequenceCache& Cache(TestGroup& group) { return **group.cache().Find(kSequence); }
  void ExpectSame(TestGroup& whole, TestGroup& begun) {
    EXPECT_EQ(Cache(begun).hash().placement, Cache(whole).hash().placement);
    for (int layer = 0; layer < options_.num_layers; ++layer) {
      EXPECT_EQ(begun.Sets(kSequence, layer), whole.Sets(kSequence, layer)) << "layer " << layer;
    }
    const SequenceStats want = *whole.cache().Stats(kSequence);
    const SequenceStats got = *begun.cache().Stats(kSequence);
    EXPECT_EQ(got.tokens_resident, want.tokens_resident);
    EXPECT_EQ(got.tokens_demoted, want.tokens_demoted);
    EXPECT_EQ(got.recall_reads, want.recall_reads);
    EXPECT_EQ(got.device_bytes, want.device_bytes);
  }

  std::mt19937 random_;
  TestGroupOptions options_;
  SequenceOptions sequence_;
  std::vector<int32_t> tokens_;
};

TEST(StoredPrefixTest, TheRestIsComputedAndTheWholeIsTheSame) {
  for (uint32_t seed = 1; seed <= 80; ++seed) {
    SCOPED_TRACE(seed);
    StoredPrefixCase(seed).Run();
    if (::testing::Test::HasFailure()) return;
  }
}

// Of a prompt of 100 tokens.
int64_t Most(Policy policy, bool recall = false) {
  SequenceOptions sequence = TestSequence(policy, Scope::kLayer, 20, 8, 100);
  sequence.policy.recall.enabled = recall;
  sequence.policy.window = 20;
  return MostStoredTokens(*ResolveBudget(sequence.policy, 100), sequence);
}

TEST(StoredPrefixTest, TheQueriesThatCountAreComputed) {
  EXPECT_EQ(Most(Policy::kFull), 99);
  EXPECT_EQ(Most(Policy::kStreaming), 99);
  EXPECT_EQ(Most(Policy::kStreaming, /*recall=*/true), 68);
  EXPECT_EQ(Most(Policy::kSnapKv), 80);
  EXPECT_EQ(Most(Policy::kSnapKvH2o), 80);
  EXPECT_EQ(Most(Policy::kSnapKvH2o, /*recall=*/true), 68);
  EXPECT_EQ(Most(Policy::kH2o), 0);
  EXPECT_EQ(Most(Policy::kScissorhands), 0);
}

TEST(StoredPrefixTest, WhatIsNotThereOrMayNotBeIsRefusedByName) {
  KeepingTier tier;
  TestGroupOptions options;
  options.tiers = {&tier};
  TestGroup group(options);
  SequenceOptions sequence = TestSequence(Policy::kFull, Scope::kLayer, 8, 8, 40);
  sequence.stored_tokens = 16;
  absl::Status status = group.cache().Open(kSequence, sequence);
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("hold 0 tokens"));
  for (const int64_t stored : {-16, 17, 48}) {
    sequence.stored_tokens = stored;
    status = group.cache().Open(kSequence, sequence);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("want a multiple of page_tokens, 16"));
  }
  sequence.policy.policy = Policy::kH2o;
  sequence.stored_tokens = 16;
  EXPECT_THAT(std::string(group.cache().Open(kSequence, sequence).message()),
              HasSubstr("of at most 0"));
}

}  // namespace
}  // namespace heavywater
