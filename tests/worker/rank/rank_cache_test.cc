#include "worker/rank/rank_cache.h"

#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/test_group.h"
#include "worker/backend/host_memory.h"
#include "worker/rank/check_finite.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

RankCacheOptions Options() {
  TestGroupOptions group;
  RankCacheOptions options;
  options.shape = TestShape(group, 0);
  options.hidden_size = 4;
  options.vocab_size = 8;
  options.max_step_tokens = 16;
  return options;
}

TEST(RankCacheTest, OptionsThatCannotWorkNameTheField) {
  struct Row {
    void (*change)(RankCacheOptions&);
    const char* error;
  };
  const Row rows[] = {
      {[](RankCacheOptions& o) { o.rank = 1; }, "rank is 1, want below 1"},
      {[](RankCacheOptions& o) { o.hidden_size = -1; }, "hidden_size is -1"},
      {[](RankCacheOptions& o) { o.vocab_size = -1; }, "vocab_size is -1"},
      {[](RankCacheOptions& o) { o.max_step_tokens = 0; }, "max_step_tokens is 0"},
      {[](RankCacheOptions& o) { o.device_memory_bytes = -1; }, "device_memory_bytes is -1"},
      {[](RankCacheOptions& o) { o.world_size = 3; }, "world_size is 3, want a divisor"},
      {[](RankCacheOptions& o) { o.world_size = 2; }, "num_kv_heads is 2, want 1 of 2 for 2"},
      {[](RankCacheOptions& o) { o.shape.head_dim = 0; }, "head_dim is 0"},
  };
  const std::unique_ptr<Backend> backend = CreateReferenceBackend();
  for (const Row& row : rows) {
    RankCacheOptions options = Options();
    row.change(options);
    const absl::Status status = RankCache::Create(options, *backend, nullptr).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(row.error));
  }
}

TEST(RankCacheTest, AWorkspaceThatDoesNotFitIsRefused) {
  const std::unique_ptr<Backend> backend = CreateReferenceBackend();
  RankCacheOptions options = Options();
  options.device_memory_bytes = 100;
  const absl::Status status = RankCache::Create(options, *backend, nullptr).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the workspace of a step needs"));
}

// A backend with streams of its own, as a GPU's.
class StreamBackend final : public HostMemoryBackend {
 public:
  absl::StatusOr<Stream> NewStream() override {
    if (fails) return absl::InternalError("no stream");
    return Stream{.handle = this};
  }
  std::string Name() const override { return "streams"; }
  absl::Status Attend(const KvShape&, const AttendParams&, Stream&) override {
    return absl::OkStatus();
  }
  absl::Status AttendPrompt(const KvShape&, const PromptParams&, Stream&) override {
    return absl::OkStatus();
  }
  absl::Status Select(const SelectParams&, Stream&) override { return absl::OkStatus(); }

  bool fails = false;
};

TEST(RankCacheTest, HasAStreamOfItsOwn) {
  StreamBackend backend;
  EXPECT_EQ((*RankCache::Create(Options(), backend, nullptr))->stream().handle, &backend);
  backend.fails = true;
  EXPECT_EQ(RankCache::Create(Options(), backend, nullptr).status(),
            absl::InternalError("no stream"));
}

class AdmissionTest : public ::testing::Test {
 protected:
  void Start(int64_t bytes_for_sequences) {
    backend_ = CreateReferenceBackend();
    RankCacheOptions options = Options();
    const auto unlimited = *RankCache::Create(options, *backend_, nullptr);
    options.device_memory_bytes = unlimited->memory().reserved_bytes() + bytes_for_sequences;
    cache_ = *RankCache::Create(options, *backend_, nullptr);
  }

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<RankCache> cache_;
};

TEST_F(AdmissionTest, ARefusalNamesNeedLimitUseAndTheLongestPromptThatFits) {
  Start(100000);
  const SequenceOptions options = TestSequence(Policy::kFull, Scope::kLayer, 1, 1, 2000, 10);
  const absl::Status status = cache_->Open(1, options);
  ASSERT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  const int64_t longest = cache_->LongestPromptThatFits(options);
  const std::string message(status.message());
  EXPECT_THAT(message, HasSubstr("needs " + std::to_string(*cache_->DeviceBytesNeeded(options))));
  EXPECT_THAT(message, HasSubstr("limit " + std::to_string(cache_->memory().limit_bytes())));
  EXPECT_THAT(message, HasSubstr("in use "));
  EXPECT_THAT(message, HasSubstr("the longest prompt that fits has " + std::to_string(longest)));
  EXPECT_EQ(cache_->num_sequences(), 0);

  EXPECT_GT(longest, 0);
  SequenceOptions fitting = options;
  fitting.prompt_tokens = longest + 1;
  fitting.max_tokens = longest + 11;
  EXPECT_FALSE(cache_->Open(1, fitting).ok());
  fitting.prompt_tokens = longest;
  fitting.max_tokens = longest + 10;
  EXPECT_TRUE(cache_->Open(1, fitting).ok());
}

TEST_F(AdmissionTest, ABoundedSequenceReachesFourTimesTheLengthAtWhichFullIsRefused) {
  Start(400000);
  const SequenceOptions full = TestSequence(Policy::kFull, Scope::kLayer, 1, 1, 50, 4000);
  ASSERT_EQ(cache_->Open(1, full).code(), absl::StatusCode::kResourceExhausted);
  const SequenceOptions bounded =
      TestSequence(Policy::kSnapKvH2o, Scope::kLayer, 64, 64, 50, 16000);
  EXPECT_TRUE(cache_->Open(1, bounded).ok());
}

TEST_F(AdmissionTest, FourTimesAsManyBoundedSequencesAreAdmitted) {
  const auto admitted = [this](const SequenceOptions& options) {
    Start(2000000);
    SequenceId id = 1;
    while (cache_->Open(id, options).ok()) ++id;
    return static_cast<int>(id) - 1;
  };
  const int full = admitted(TestSequence(Policy::kFull, Scope::kLayer, 1, 1, 1000, 100));
  const int bounded = admitted(TestSequence(Policy::kSnapKvH2o, Scope::kLayer, 25, 25, 1000, 100));
  EXPECT_GT(full, 1);
  EXPECT_GE(bounded, 4 * full);
}

TEST_F(AdmissionTest, ClosingGivesEverythingBack) {
  Start(200000);
  const int64_t before = cache_->memory().reserved_bytes();
  ASSERT_TRUE(cache_->Open(1, TestSequence(Policy::kFull, Scope::kLayer, 1, 1, 100, 10)).ok());
  EXPECT_GT(cache_->memory().reserved_bytes(), before);
  ASSERT_TRUE(cache_->Close(1).ok());
  EXPECT_EQ(cache_->memory().reserved_bytes(), before);
  EXPECT_EQ(cache_->Close(1).code(), absl::StatusCode::kNotFound);
}

TEST_F(AdmissionTest, OpeningTwiceOrWithBadOptionsIsRefused) {
  Start(200000);
  const SequenceOptions good = TestSequence(Policy::kH2o, Scope::kLayer, 8, 8, 10);
  ASSERT_TRUE(cache_->Open(1, good).ok());
  EXPECT_EQ(cache_->Open(1, good).code(), absl::StatusCode::kAlreadyExists);
  SequenceOptions bad = good;
  bad.prompt_tokens = 0;
  EXPECT_THAT(std::string(cache_->Open(2, bad).message()), HasSubstr("prompt_tokens is 0"));
  bad = good;
  bad.max_tokens = 9;
  EXPECT_THAT(std::string(cache_->Open(2, bad).message()),
              HasSubstr("max_tokens is 9, want at least 10"));
  bad = good;
  bad.policy.decay = -1;
  EXPECT_THAT(std::string(cache_->Open(2, bad).message()), HasSubstr("decay is -1"));
  EXPECT_EQ(cache_->num_sequences(), 1);
}

// The whole life of a sequence, with another one in the same batch, within
// exactly what admission reserved.
TEST(RankCacheTest, WhatIsAllocatedStaysWithinWhatWasReserved) {
  for (Policy policy :
       {Policy::kFull, Policy::kStreaming, Policy::kH2o, Policy::kSnapKv, Policy::kSnapKvH2o}) {
    for (Scope scope : {Scope::kLayer, Scope::kKvHead}) {
      TestGroupOptions options;
      options.max_step_tokens = 16;
      const SequenceOptions sequence = TestSequence(policy, scope, 12, 6, 50, 40);
      {
        TestGroup unlimited(options);
        options.device_memory_bytes = unlimited.cache().memory().reserved_bytes() +
                                      2 * *unlimited.cache().DeviceBytesNeeded(sequence);
      }
      TestGroup group(options);
      ASSERT_TRUE(group.Open(1, sequence).ok());
      ASSERT_TRUE(group.OpenAndRunPrompt(2, sequence, TestTokens(2, 50)).ok());
      ASSERT_TRUE(group.RunPrompt(1, TestTokens(1, 50)).ok());
      for (int i = 50; i < 90; ++i) {
        const absl::Status status =
            group.Append({{1, TestTokens(1, 1, i)}, {2, TestTokens(2, 1, i)}});
        ASSERT_TRUE(status.ok()) << PolicyName(policy) << " " << status;
      }
      ASSERT_TRUE(group.Close(2).ok());
      ASSERT_TRUE(group.Close(1).ok());
      EXPECT_EQ(group.cache().memory().kv_gauge().current_bytes, 0);
    }
  }
}

TEST(RankCacheTest, UnboundedPoliciesGrowByPages) {
  TestGroupOptions options;  // pages of 16
  TestGroup group(options);
  ASSERT_TRUE(group
                  .OpenAndRunPrompt(1, TestSequence(Policy::kFull, Scope::kLayer, 1, 1, 17, 40),
                                    TestTokens(0, 17))
                  .ok());
  const int64_t page = 2 * DeviceLayerBytes(TestShape(options, 0), 1, 16).total();
  EXPECT_EQ(group.cache().Stats(1)->device_bytes, 2 * page);
  for (int i = 17; i < 33; ++i) ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, i)}}).ok());
  EXPECT_EQ(group.cache().Stats(1)->device_bytes, 3 * page);
}

TEST(RankCacheTest, ReportsAscendingPositionsWithScoresPerLayerAndSet) {
  TestGroupOptions options;
  TestGroup group(options);
  ASSERT_TRUE(group
                  .OpenAndRunPrompt(1, TestSequence(Policy::kH2o, Scope::kKvHead, 8, 4, 30),
                                    TestTokens(0, 30))
                  .ok());
  const PlanReport at_prompts_end = *group.cache().Report(1, true);
  EXPECT_EQ(at_prompts_end.plan_number, 0);
  ASSERT_TRUE(group.Append({{1, TestTokens(0, 1, 30)}}).ok());
  const PlanReport report = *group.cache().Report(1, true);
  EXPECT_EQ(report.plan_number, 1);
  EXPECT_EQ(report.tokens_seen, 31);
  EXPECT_EQ(report.tokens_resident, 12);
  EXPECT_EQ(report.watermark, 31);
  EXPECT_NE(report.hash, at_prompts_end.hash);
  ASSERT_EQ(report.sets.size(), 4u);
  for (size_t i = 0; i < 4; ++i) {
    const ResidentSet& set = report.sets[i];
    EXPECT_EQ(set.layer, static_cast<int>(i) / 2);
    EXPECT_EQ(set.kv_head, static_cast<int>(i) % 2);
    EXPECT_EQ(set.positions.size(), 12u);
    EXPECT_EQ(set.scores.size(), 12u);
    EXPECT_TRUE(std::is_sorted(set.positions.begin(), set.positions.end()));
  }
  EXPECT_TRUE(group.cache().Report(1, false)->sets.empty());
  EXPECT_EQ(group.cache().Report(9, false).status().code(), absl::StatusCode::kNotFound);
}

TEST(RankCacheTest, PlansAreDueAtMultiplesOfTheIntervalSinceThePrompt) {
  TestGroup group(TestGroupOptions{});
  SequenceOptions sequence = TestSequence(Policy::kH2o, Scope::kLayer, 8, 4, 30);
  sequence.policy.plan_interval_steps = 4;
  EXPECT_FALSE(group.cache().PlanDue(1, 4));
  ASSERT_TRUE(group.OpenAndRunPrompt(1, sequence, TestTokens(0, 30)).ok());
  EXPECT_FALSE(group.cache().PlanDue(1, 3));
  EXPECT_TRUE(group.cache().PlanDue(1, 4));
  EXPECT_TRUE(group.cache().PlanDue(1, 6));
  ASSERT_TRUE(group.Append({{1, TestTokens(0, 3, 30)}}).ok());
  EXPECT_TRUE(group.cache().PlanDue(1, 1));
  EXPECT_EQ(group.cache().Stats(1)->plans, 0);
}

TEST(CheckFiniteTest, NamesTheFirstElementThatIsNotANumber) {
  const std::vector<float> good = {0, 1, -1e30f};
  EXPECT_TRUE(CheckFinite("keys", good).ok());
  EXPECT_TRUE(CheckFinite("keys", {}).ok());
  for (float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const std::vector<float> values = {0, 1, bad, bad};
    const absl::Status status = CheckFinite("keys", values);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("keys[2] is "));
  }
}

}  // namespace
}  // namespace heavywater
