// Recall through the rank: picks, promotions and what is kept equal the plain
// reference; recalling everything equals the full cache.
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cache_service/tier/local_host_tier.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/flaky_host_tier.h"
#include "tests/worker/rank/plain_sequence.h"
#include "tests/worker/rank/test_group.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

int Pick(std::mt19937& random, std::initializer_list<int> choices) {
  return choices.begin()[random() % choices.size()];
}

int Between(std::mt19937& random, int low, int high) {
  return low + static_cast<int>(random() % (high - low + 1));
}

// Rounding of double probabilities that are summed in another order.
constexpr int64_t kTolerance = 2000;

TestGroupOptions RandomGroup(std::mt19937& random) {
  TestGroupOptions options;
  options.world_size = Between(random, 1, 3);
  options.kv_heads = options.world_size * Pick(random, {1, 1, 2});
  options.query_heads = options.kv_heads * Between(random, 1, 4);
  options.num_layers = Between(random, 1, 2);
  options.head_dim = Pick(random, {16, 24, 64});
  options.page_tokens = Pick(random, {16, 32});
  options.dtype = kKvDtypes[random() % 3];
  options.max_step_tokens = Pick(random, {7, 16, 64});
  options.seed = random();
  return options;
}

SequenceOptions RandomSequence(std::mt19937& random, Policy policy, Scope scope) {
  const int sinks = Pick(random, {0, 0, 1, 4});
  SequenceOptions options = TestSequence(policy, scope, sinks + Between(random, 1, 20),
                                         Between(random, 1, 24), Between(random, 1, 90), 64);
  options.policy.sink_tokens = sinks;
  options.policy.window = Pick(random, {4, 8, 32});
  options.policy.pooling = static_cast<Pooling>(random() % 3);
  options.policy.pool_kernel = Pick(random, {1, 5, 7});
  options.policy.plan_interval_steps = Pick(random, {1, 2, 5, 16});
  options.policy.decay = random() % 2 == 0 ? 1.0 : 0.9;
  options.policy.pooled_seeds = random() % 2 == 0;
  RecallOptions& recall = options.policy.recall;
  recall.enabled = true;
  recall.all = random() % 8 == 0;
  recall.recall_tokens = Pick(random, {1, 4, 16, 64});
  recall.min_share = std::vector<double>{0, 1e-4, 1e-2}[random() % 3];
  recall.promote_candidates = Pick(random, {0, 1, 4, 32});
  return options;
}

// A group with a host tier for each rank.
class RecallGroup {
 public:
  explicit RecallGroup(TestGroupOptions options) {
    for (int rank = 0; rank < options.world_size; ++rank) {
      tiers_.push_back(std::make_unique<LocalHostTier>(int64_t{1} << 30));
      options.tiers.push_back(tiers_.back().get());
    }
    group_ = std::make_unique<TestGroup>(options);
  }
  TestGroup& operator*() { return *group_; }
  TestGroup* operator->() { return group_.get(); }

 private:
  std::vector<std::unique_ptr<LocalHostTier>> tiers_;
  std::unique_ptr<TestGroup> group_;
};

constexpr Policy kPolicies[] = {Policy::kSnapKvH2o, Policy::kH2o, Policy::kSnapKvH2o,
                                Policy::kStreaming, Policy::kSnapKv};

class Case {
 public:
  explicit Case(uint32_t seed, bool cpu_backend = false)
      : random_(seed), group_(Options(cpu_backend)), policy_(kPolicies[seed % 5]) {
    scope_ = seed / 5 % 2 == 0 ? Scope::kLayer : Scope::kKvHead;
  }

  TestGroup& group() { return *group_; }
  size_t num_sequences() const { return plain_.size(); }
  PlainSequence& plain(size_t i) { return plain_[i]; }
  std::mt19937& random() { return random_; }

  void Join() {
    const SequenceOptions options = RandomSequence(random_, policy_, scope_);
    const auto tag = static_cast<int>(plain_.size());
    const std::vector<int32_t> tokens = TestTokens(tag, options.prompt_tokens);
    plain_.emplace_back(*group_, options.policy);
    plain_.back().Prompt(tokens);
    const absl::Status status = group_->OpenAndRunPrompt(tag + 1, options, tokens);
    ASSERT_TRUE(status.ok()) << status;
  }

  // Every sequence gets a token, sometimes some more.
  void Step() {
    std::vector<TestAppend> appends;
    int room = group_->options().max_step_tokens - static_cast<int>(plain_.size());
    for (size_t i = 0; i < plain_.size(); ++i) {
      const int extra = random_() % 4 == 0 ? std::min(room, Between(random_, 1, 4)) : 0;
      room -= extra;
      appends.push_back(
          {i + 1, TestTokens(static_cast<int>(i), 1 + extra, plain_[i].tokens_seen())});
      plain_[i].Append(appends.back().tokens);
    }
    const absl::Status status = group_->Append(appends);
    ASSERT_TRUE(status.ok()) << status;
  }

  void ExpectEqual() {
    for (size_t i = 0; i < plain_.size(); ++i) {
      EXPECT_EQ(plain_[i].Compare(*group_, i + 1, kTolerance), "")
          << PolicyName(policy_) << " " << ScopeName(scope_) << " TP " << group_->world_size()
          << " sequence " << i << " at " << plain_[i].tokens_seen();
    }
  }

  // Over ranks and sequences.
  RecallStats Stats() {
    RecallStats sum;
    for (int rank = 0; rank < group_->world_size(); ++rank) {
      for (SequenceId id : group_->cache(rank).sequence_ids()) {
        const RecallStats stats = (*group_->cache(rank).Find(id))->recall()->stats();
        sum.reads += stats.reads;
        sum.promoted += stats.promoted;
        sum.queries += stats.queries;
      }
    }
    return sum;
  }

 private:
  TestGroupOptions Options(bool cpu_backend) {
    TestGroupOptions options = RandomGroup(random_);
    options.cpu_backend = cpu_backend;
    return options;
  }

  std::mt19937 random_;
  RecallGroup group_;
  Policy policy_;
  Scope scope_ = Scope::kLayer;
  std::vector<PlainSequence> plain_;
};

TEST(RecallTest, PicksPromotionsAndOutputsEqualThePlainReferenceIn200RandomCases) {
  RecallStats sum;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Case random_case(seed);
    random_case.Join();
    random_case.ExpectEqual();
    for (int step = 0; step < 24; ++step) {
      if (step % 9 == 4 && random_case.random()() % 2 == 0) random_case.Join();
      random_case.Step();
      random_case.ExpectEqual();
      if (::testing::Test::HasFailure()) return;
    }
    const RecallStats stats = random_case.Stats();
    sum.reads += stats.reads;
    sum.promoted += stats.promoted;
    sum.queries += stats.queries;
  }
  // That the cases do what they are for.
  EXPECT_GT(sum.reads, sum.queries);
  EXPECT_GT(sum.promoted, 1000);
}

SequenceOptions RecallSequence(int64_t prompt, int64_t heavy = 12, int64_t recent = 8) {
  SequenceOptions options = TestSequence(Policy::kSnapKvH2o, Scope::kLayer, heavy, recent, prompt);
  options.policy.plan_interval_steps = 4;
  options.policy.recall.enabled = true;
  return options;
}

TEST(RecallTest, OfEverythingEqualsTheFullCache) {
  for (const Scope scope : {Scope::kLayer, Scope::kKvHead}) {
    for (const bool cpu_backend : {false, true}) {
      TestGroupOptions group_options;
      group_options.head_dim = 32;
      group_options.cpu_backend = cpu_backend;
      RecallGroup group(group_options);
      SequenceOptions options = RecallSequence(70);
      options.policy.scope = scope;
      options.policy.recall.all = true;
      PolicyOptions full = options.policy;
      full.policy = Policy::kFull;
      full.recall.enabled = false;
      PlainSequence plain(*group, full);
      plain.Prompt(TestTokens(0, 70));
      ASSERT_TRUE(group->OpenAndRunPrompt(1, options, TestTokens(0, 70)).ok());
      for (int64_t seen = 70; seen < 120; seen += 2) {
        plain.Append(TestTokens(0, 2, seen));
        ASSERT_TRUE(group->Append({{1, TestTokens(0, 2, seen)}}).ok());
        for (int layer = 0; layer < group_options.num_layers; ++layer) {
          EXPECT_EQ(plain.CompareAttention(*group, layer), "") << "at " << seen;
        }
      }
      EXPECT_LT(group->cache().Stats(1)->tokens_resident, 25);
    }
  }
}

TEST(RecallTest, DoesNotDependOnTheNumberOfRanks) {
  std::vector<std::vector<Ledger>> of_one_rank;
  for (const int world_size : {1, 3}) {
    TestGroupOptions options;
    options.world_size = world_size;
    options.kv_heads = 3;
    options.query_heads = 9;
    options.head_dim = 64;
    RecallGroup group(options);
    SequenceOptions sequence = RecallSequence(100);
    sequence.policy.recall.recall_tokens = 8;
    sequence.policy.recall.promote_candidates = 2;
    ASSERT_TRUE(group->OpenAndRunPrompt(1, sequence, TestTokens(0, 100)).ok());
    for (int64_t seen = 100; seen < 160; ++seen) {
      ASSERT_TRUE(group->Append({{1, TestTokens(0, 1, seen)}}).ok());
      const std::vector<Ledger> sets = group->Sets(1, 0);
      if (world_size == 1) {
        of_one_rank.push_back(sets);
      } else {
        EXPECT_EQ(sets, of_one_rank[seen - 100]) << "at " << seen;
      }
    }
  }
}

TEST(RecallTest, CountsSketchesAsDeviceMemoryAndGivesThemBack) {
  RecallGroup group(TestGroupOptions{.head_dim = 64, .device_memory_bytes = int64_t{4} << 20});
  const DeviceMemory& memory = group->cache().memory();
  const int64_t idle = memory.reserved_bytes();
  ASSERT_TRUE(group->OpenAndRunPrompt(1, RecallSequence(90), TestTokens(0, 90)).ok());
  const int64_t sketches = memory.gauge(MemoryKind::kSketches).current_bytes;
  // 6 pages of 2 layers and 2 heads: 16 codes of 8 bytes, and 160 more.
  EXPECT_GE(sketches, 6 * 2 * 2 * (16 * 8 + 160));
  const SequenceStats stats = *group->cache().Stats(1);
  EXPECT_EQ(stats.device_bytes, memory.kv_gauge().current_bytes);
  ASSERT_TRUE(group->Close(1).ok());
  EXPECT_EQ(memory.gauge(MemoryKind::kSketches).current_bytes, 0);
  EXPECT_EQ(memory.reserved_bytes(), idle);
}

TEST(RecallTest, ABudgetByDeviceRatioStaysWithinItsShareOfTheFullCache) {
  for (const double ratio : {0.1, 0.2, 0.5}) {
    RecallGroup group(TestGroupOptions{.head_dim = 64, .page_tokens = 256});
    SequenceOptions options = TestSequence(Policy::kSnapKvH2o, Scope::kLayer, 1, 32, 1500);
    options.policy.heavy_tokens = 0;
    options.policy.sink_tokens = 4;
    options.policy.min_budget_tokens = 1;
    options.policy.plan_interval_steps = 16;
    options.policy.device_ratio = ratio;
    options.policy.recall.enabled = true;
    ASSERT_TRUE(group->OpenAndRunPrompt(1, options, TestTokens(0, 1500)).ok());
    const SequenceStats stats = *group->cache().Stats(1);
    const KvShape shape = TestShape(group->options(), 0);
    const int64_t full = int64_t{1536} * shape.num_layers * shape.num_kv_heads * shape.row_bytes();
    EXPECT_LE(stats.device_bytes, ratio * full);
    EXPECT_GE(stats.device_bytes, 0.95 * ratio * full);
    EXPECT_EQ(stats.budget.recent_tokens, 32);
  }
}

// Rank 1 finds no host memory after a while: what it cannot copy is dropped, is
// never picked there and promoted nowhere; the ranks stay in step.
TEST(RecallTest, PositionsWithoutACopyAreNeitherPickedNorPromoted) {
  std::vector<FlakyHostTier> tiers(2);
  TestGroupOptions options{.world_size = 2, .query_heads = 4, .kv_heads = 2, .head_dim = 64};
  options.reserve_ahead_tokens = 0;
  for (FlakyHostTier& tier : tiers) options.tiers.push_back(&tier);
  TestGroup group(options);
  SequenceOptions sequence = RecallSequence(64);
  sequence.on_host_full = OnHostFull::kDrop;
  sequence.policy.recall.min_share = 0;
  sequence.policy.recall.recall_tokens = 256;
  ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 64)).ok());
  tiers[1].reserve_status = absl::ResourceExhaustedError("full");
  for (int64_t seen = 64; seen < 160; ++seen) {
    const absl::Status status = group.Append({{1, TestTokens(0, 1, seen)}});
    ASSERT_TRUE(status.ok()) << status;
  }
  const SequenceStats stats = *group.cache(1).Stats(1);
  EXPECT_GT(stats.tokens_dropped, 60);
  // Everything demoted that has a copy is picked.
  EXPECT_LE((*group.cache(1).Find(1))->recall()->stats().reads_max, 64);
  EXPECT_GT((*group.cache(0).Find(1))->recall()->stats().reads_max, 100);
  group.Sets(1, 0);  // checks that the ranks agree
}

TEST(RecallTest, RefusesWhatItCannotDo) {
  TestGroup without_tier({.head_dim = 64});
  absl::Status status = without_tier.Open(1, RecallSequence(20));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no host tier"));

  RecallGroup shared_heads(TestGroupOptions{.world_size = 2, .kv_heads = 1, .head_dim = 64});
  status = shared_heads->Open(1, RecallSequence(20));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("KV heads"));

  RecallGroup group(TestGroupOptions{.head_dim = 64, .page_tokens = 24});
  status = group->Open(1, RecallSequence(20));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("page_tokens is 24"));
}

}  // namespace
}  // namespace heavywater
