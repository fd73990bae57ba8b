// An engine keeps and returns what the runner does on the same Q, K and V, however
// it cuts its prompts and batches.
#include "worker/rank/attention_engine.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "cache_service/tier/local_host_tier.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/flaky_host_tier.h"
#include "tests/worker/rank/test_engine_group.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

using ::testing::ElementsAreArray;
using ::testing::HasSubstr;

// A host tier for each rank.
struct Tiers {
  explicit Tiers(TestGroupOptions& options) {
    for (int rank = 0; rank < options.world_size; ++rank) {
      tiers.push_back(std::make_unique<LocalHostTier>(int64_t{1} << 30));
      options.tiers.push_back(tiers.back().get());
    }
  }
  std::vector<std::unique_ptr<LocalHostTier>> tiers;
};

EngineAppend Append(SequenceId sequence, EnginePhase phase, int64_t first, int64_t count) {
  return {.item = {.sequence = sequence,
                   .phase = phase,
                   .first_position = static_cast<Position>(first),
                   .num_tokens = count},
          .tokens = TestTokens(static_cast<int>(sequence), count, first)};
}

EngineAppend Token(SequenceId sequence, int64_t position) {
  return Append(sequence, EnginePhase::kDecode, position, 1);
}

SequenceOptions RecallSequence(int64_t prompt) {
  SequenceOptions options = TestSequence(Policy::kSnapKvH2o, Scope::kLayer, 12, 8, prompt);
  options.policy.plan_interval_steps = 4;
  options.policy.recall.enabled = true;
  return options;
}

int Between(std::mt19937& random, int low, int high) {
  return low + static_cast<int>(random() % (high - low + 1));
}

constexpr Policy kPolicies[] = {Policy::kFull, Policy::kStreaming, Policy::kH2o, Policy::kSnapKv,
                                Policy::kSnapKvH2o};

// The same sequences in both, step by step.
class Comparison {
 public:
  explicit Comparison(uint32_t seed) : random_(seed) {
    TestGroupOptions options;
    options.world_size = Between(random_, 1, 3);
    options.kv_heads = options.world_size * Between(random_, 1, 2);
    options.query_heads = options.kv_heads * Between(random_, 1, 3);
    options.head_dim = 16;
    options.max_step_tokens = 24;
    options.seed = random_();
    options.dtype = random_() % 2 == 0 ? KvDtype::kFloat32 : KvDtype::kBFloat16;
    TestGroupOptions of_runner = options;
    runner_tiers_.emplace(of_runner);
    engine_tiers_.emplace(options);
    runner_ = std::make_unique<TestGroup>(of_runner);
    engine_ = std::make_unique<TestEngineGroup>(options);
    const Policy policy = kPolicies[seed % 5];
    base_ = TestSequence(policy, seed / 5 % 2 == 0 ? Scope::kLayer : Scope::kKvHead, 10, 6, 1);
    base_.policy.sink_tokens = 2;
    base_.policy.window = 8;
    base_.policy.plan_interval_steps = Between(random_, 1, 3);
    base_.policy.recall.enabled = policy != Policy::kFull && random_() % 2 == 0;
  }

  // A new sequence, whose prompt comes whole, layer by layer in parts, or in steps;
  // the others get a token wherever they may.
  void Join() {
    SequenceOptions options = base_;
    options.prompt_tokens = Between(random_, 1, 60);
    options.max_tokens = options.prompt_tokens + 100;
    const SequenceId sequence = seen_.size() + 1;
    ASSERT_TRUE(
        runner_
            ->OpenAndRunPrompt(sequence, options,
                               TestTokens(static_cast<int>(sequence), options.prompt_tokens))
            .ok());
    options.prompt_in_steps = random_() % 2 == 0;
    ASSERT_TRUE(engine_->Open(sequence, options).ok());
    if (options.prompt_in_steps) {
      PromptInSteps(sequence, options.prompt_tokens);
    } else {
      const EngineAppend all = Append(sequence, EnginePhase::kPromptLast, 0, options.prompt_tokens);
      const absl::Status status = engine_->Step({all}, Between(random_, 1, 24));
      ASSERT_TRUE(status.ok()) << status;
    }
    seen_.push_back(options.prompt_tokens);
  }

  void Decode(const std::vector<EngineAppend>& with = {}) {
    std::vector<EngineAppend> appends;
    std::vector<TestAppend> of_runner;
    for (size_t i = 0; i < seen_.size(); ++i) {
      const int count = Between(random_, 1, 3);
      appends.push_back(Append(i + 1, EnginePhase::kDecode, seen_[i], count));
      of_runner.push_back({i + 1, appends.back().tokens});
      seen_[i] += count;
    }
    appends.insert(appends.begin() + (random_() % (appends.size() + 1)), with.begin(), with.end());
    if (!of_runner.empty()) {
      ASSERT_TRUE(runner_->Append(of_runner).ok());
    }
    const absl::Status status = engine_->Step(appends);
    ASSERT_TRUE(status.ok()) << status;
    for (const TestAppend& append : of_runner) {
      const int64_t first = seen_[append.sequence - 1] - static_cast<int64_t>(append.tokens.size());
      ExpectEqualAttention(append, static_cast<Position>(first));
    }
  }

  void ExpectEqualSets() {
    for (SequenceId sequence = 1; sequence <= seen_.size(); ++sequence) {
      for (int layer = 0; layer < engine_->options().num_layers; ++layer) {
        EXPECT_EQ(engine_->Sets(sequence, layer), runner_->Sets(sequence, layer))
            << "sequence " << sequence << " layer " << layer;
      }
    }
  }

  size_t num_sequences() const { return seen_.size(); }

 private:
  void PromptInSteps(SequenceId sequence, int64_t tokens) {
    for (int64_t done = 0; done < tokens;) {
      const int64_t count = std::min<int64_t>(Between(random_, 1, 12), tokens - done);
      const EnginePhase phase =
          done + count == tokens ? EnginePhase::kPromptLast : EnginePhase::kPrompt;
      Decode({Append(sequence, phase, done, count)});
      done += count;
    }
  }

  void ExpectEqualAttention(const TestAppend& append, Position first) {
    for (int layer = 0; layer < engine_->options().num_layers; ++layer) {
      for (size_t i = 0; i < append.tokens.size(); ++i) {
        const Position position = first + static_cast<Position>(i);
        EXPECT_EQ(engine_->Attention(layer, append.tokens[i], position),
                  runner_->Attention(layer, append.tokens[i], position))
            << "sequence " << append.sequence << " layer " << layer << " position " << position;
      }
    }
  }

  std::mt19937 random_;
  std::optional<Tiers> runner_tiers_;
  std::optional<Tiers> engine_tiers_;
  std::unique_ptr<TestGroup> runner_;
  std::unique_ptr<TestEngineGroup> engine_;
  SequenceOptions base_;
  std::vector<int64_t> seen_;  // by sequence
};

TEST(AttentionEngineTest, KeepsAndReturnsWhatTheRunnerDoesIn100RandomCases) {
  for (uint32_t seed = 0; seed < 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Comparison both(seed);
    for (int step = 0; step < 12; ++step) {
      if (step % 4 == 0) both.Join();
      both.Decode();
      both.ExpectEqualSets();
      if (::testing::Test::HasFailure()) return;
    }
    EXPECT_EQ(both.num_sequences(), 3u);
  }
}

// The whole text's attention at `position`, one query head, in double.
std::vector<float> PlainAttention(const TestEngineGroup& group, int layer, SequenceId sequence,
                                  int64_t position) {
  const TestGroupOptions& options = group.options();
  const SyntheticRow rows =
      group.RowsOf(0, layer, {Append(sequence, EnginePhase::kDecode, 0, position + 1)});
  const int dim = options.head_dim;
  std::vector<float> out;
  for (int head = 0; head < options.query_heads; ++head) {
    const int kv_head = head / (options.query_heads / options.kv_heads);
    const float* query = &rows.q[(position * options.query_heads + head) * dim];
    std::vector<double> weights;
    double sum = 0;
    for (int64_t p = 0; p <= position; ++p) {
      double logit = 0;
      for (int c = 0; c < dim; ++c) {
        logit += double{query[c]} * rows.k[(p * options.kv_heads + kv_head) * dim + c];
      }
      weights.push_back(std::exp(logit / std::sqrt(dim)));
      sum += weights.back();
    }
    for (int c = 0; c < dim; ++c) {
      double value = 0;
      for (int64_t p = 0; p <= position; ++p) {
        value += weights[p] / sum * rows.v[(p * options.kv_heads + kv_head) * dim + c];
      }
      out.push_back(static_cast<float>(value));
    }
  }
  return out;
}

TEST(AttentionEngineTest, RecallOfEverythingEqualsAttentionToTheWholeText) {
  TestGroupOptions options{.head_dim = 32, .cpu_backend = true};
  Tiers tiers(options);
  TestEngineGroup group(options);
  SequenceOptions sequence = RecallSequence(64);
  sequence.policy.recall.all = true;
  ASSERT_TRUE(group.Open(1, sequence).ok());
  ASSERT_TRUE(group.Step({Append(1, EnginePhase::kPromptLast, 0, 64)}).ok());
  for (int64_t position = 64; position < 90; ++position) {
    ASSERT_TRUE(group.Step({Token(1, position)}).ok());
    for (int layer = 0; layer < options.num_layers; ++layer) {
      const std::vector<float> want = PlainAttention(group, layer, 1, position);
      const std::vector<float> got =
          group.Attention(layer, TestTokens(1, 1, position)[0], static_cast<Position>(position));
      for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-3) << position;
    }
  }
  EXPECT_LT(group.engine().Kept(1)->report.tokens_resident, 25);
}

TEST(AttentionEngineTest, PicksAreListedByQueryAsTheyWereRead) {
  TestGroupOptions options{.head_dim = 64};
  Tiers tiers(options);
  TestEngineGroup group(options);
  SequenceOptions sequence = RecallSequence(64);
  sequence.policy.recall.recall_tokens = 5;
  sequence.policy.recall.min_share = 0;
  ASSERT_TRUE(group.Open(1, sequence).ok());
  ASSERT_TRUE(group.Step({Append(1, EnginePhase::kPromptLast, 0, 64)}).ok());
  EXPECT_TRUE(group.engine().Kept(1)->picks.empty());
  EngineAppend append = Append(1, EnginePhase::kDecode, 64, 2);
  append.item.note_picks = true;
  ASSERT_TRUE(group.Step({append}).ok());
  const KeptSequence kept = *group.engine().Kept(1);
  ASSERT_EQ(kept.picks.size(), 2u * 2 * 2);  // layers, queries, KV heads
  for (const QueryPicks& picks : kept.picks) {
    EXPECT_EQ(picks.positions.size(), 5u);
    EXPECT_TRUE(std::is_sorted(picks.positions.begin(), picks.positions.end()));
    EXPECT_TRUE(picks.query == 64 || picks.query == 65);
    const Ledger set = group.Sets(1, picks.layer)[0];
    for (const Position position : picks.positions) EXPECT_FALSE(set.contains(position));
  }
  // Another step that does not ask keeps none.
  ASSERT_TRUE(group.Step({Token(1, 66)}).ok());
  EXPECT_TRUE(group.engine().Kept(1)->picks.empty());
}

TEST(AttentionEngineTest, EveryPositionReadsBackBitForBitWhereverItIs) {
  TestGroupOptions options{.world_size = 2, .head_dim = 16};
  Tiers tiers(options);
  TestEngineGroup group(options);
  SequenceOptions sequence = RecallSequence(40);
  ASSERT_TRUE(group.Open(1, sequence).ok());
  ASSERT_TRUE(group.Step({Append(1, EnginePhase::kPromptLast, 0, 40)}).ok());
  for (int64_t p = 40; p < 50; ++p) ASSERT_TRUE(group.Step({Token(1, p)}).ok());
  ASSERT_LT(group.engine().Kept(1)->report.tokens_resident, 30);
  for (int rank = 0; rank < 2; ++rank) {
    for (int64_t position = 0; position < 50; ++position) {
      const SyntheticRow row = group.RowsOf(rank, 1, {Token(1, position)});
      std::vector<float> want = row.k;
      want.insert(want.end(), row.v.begin(), row.v.end());
      const auto got = group.engine(rank).ReadKv(1, 1, 0, static_cast<Position>(position));
      ASSERT_TRUE(got.ok()) << got.status();
      EXPECT_THAT(*got, ElementsAreArray(std::as_bytes(std::span(want)))) << position;
    }
  }
  AttentionEngine& engine = group.engine();
  EXPECT_EQ(engine.ReadKv(1, 1, 0, 50).status().code(), absl::StatusCode::kOutOfRange);
  EXPECT_EQ(engine.ReadKv(1, 2, 0, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine.ReadKv(1, 0, 1, 0).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(engine.ReadKv(9, 0, 0, 0).status().code(), absl::StatusCode::kNotFound);
}

TEST(AttentionEngineTest, WhatIsNoLongerAnywhereIsNotFound) {
  TestEngineGroup group({});  // no host tier
  ASSERT_TRUE(group.Open(1, TestSequence(Policy::kStreaming, Scope::kLayer, 1, 4, 20)).ok());
  ASSERT_TRUE(group.Step({Append(1, EnginePhase::kPromptLast, 0, 20)}).ok());
  EXPECT_TRUE(group.engine().ReadKv(1, 0, 0, 19).ok());
  EXPECT_EQ(group.engine().ReadKv(1, 0, 0, 10).status().code(), absl::StatusCode::kNotFound);
}

// Two sequences: one in its prompt (10 of 30 tokens), one that decodes at 20.
class RefusalTest : public ::testing::Test {
 protected:
  RefusalTest() : group_({.max_step_tokens = 32}) {
    SequenceOptions in_steps = TestSequence(Policy::kH2o, Scope::kLayer, 4, 4, 30);
    in_steps.prompt_in_steps = true;
    EXPECT_TRUE(group_.Open(1, in_steps).ok());
    EXPECT_TRUE(group_.Step({Append(1, EnginePhase::kPrompt, 0, 10)}).ok());
    EXPECT_TRUE(group_.Open(2, TestSequence(Policy::kH2o, Scope::kLayer, 4, 4, 20, 10)).ok());
    EXPECT_TRUE(group_.Step({Append(2, EnginePhase::kPromptLast, 0, 20)}).ok());
    EXPECT_TRUE(group_.Open(3, TestSequence(Policy::kH2o, Scope::kLayer, 4, 4, 20)).ok());
  }
  TestEngineGroup group_;
};

TEST_F(RefusalTest, OfAStepNamesTheFieldAndChangesNothing) {
  const EnginePhase prompt = EnginePhase::kPrompt;
  const EnginePhase last = EnginePhase::kPromptLast;
  const EnginePhase decode = EnginePhase::kDecode;
  struct Case {
    std::vector<EngineAppend> appends;
    absl::StatusCode code;
    const char* message;
  };
  const Case cases[] = {
      {{}, absl::StatusCode::kInvalidArgument, "items is empty"},
      {{Token(9, 0)}, absl::StatusCode::kNotFound, "sequence 9 is not open"},
      {{Token(2, 20), Token(2, 20)}, absl::StatusCode::kInvalidArgument, "sequence 2 twice"},
      {{Append(2, decode, 20, 0)}, absl::StatusCode::kInvalidArgument, "num_tokens of sequence 2"},
      {{Token(2, 21)},
       absl::StatusCode::kInvalidArgument,
       "first_position of sequence 2 is 21, want 20"},
      {{Append(2, decode, 20, 11)}, absl::StatusCode::kOutOfRange, "max_tokens, 30"},
      {{Append(2, prompt, 20, 1)}, absl::StatusCode::kFailedPrecondition, "want DECODE"},
      {{Append(1, decode, 10, 1)}, absl::StatusCode::kFailedPrecondition, "10 of 30 tokens"},
      {{Append(1, prompt, 0, 10)}, absl::StatusCode::kInvalidArgument, "want 10 (tokens appended)"},
      {{Append(1, prompt, 10, 20)}, absl::StatusCode::kInvalidArgument, "want fewer than 30"},
      {{Append(1, last, 10, 19)}, absl::StatusCode::kInvalidArgument, "PROMPT_LAST, want 30"},
      {{Append(3, prompt, 0, 10)}, absl::StatusCode::kFailedPrecondition, "prompt_in_steps"},
      {{Append(1, last, 10, 20), Append(3, last, 0, 20)},
       absl::StatusCode::kInvalidArgument,
       "max_step_tokens, 32"},
  };
  for (const Case& one : cases) {
    const absl::Status status = group_.Begin(one.appends);
    EXPECT_EQ(status.code(), one.code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(one.message));
    EXPECT_FALSE(group_.engine().in_step());
  }
  const absl::Status status = group_.Step({Append(1, last, 10, 20), Append(2, decode, 20, 10)});
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(RefusalTest, OfALayerNamesTheArrayAndTheStepGoesOn) {
  AttentionEngine& engine = group_.engine();
  const std::vector<EngineAppend> appends = {Token(2, 20)};
  const SyntheticRow row = group_.RowsOf(0, 0, appends);
  std::vector<float> out(row.q.size());
  const HostRows good{.queries = row.q, .keys = row.k, .values = row.v, .out = out};
  const auto refused = [&](int layer, const HostRows& rows, const char* message) {
    const absl::Status status = engine.AttendHost(layer, rows);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message)) << status;
    return status.code();
  };
  EXPECT_EQ(refused(0, good, "want Begin"), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine.End().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(group_.Begin(appends).ok());
  EXPECT_EQ(group_.Begin(appends).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(refused(1, good, "layer is 1, want 0"), absl::StatusCode::kFailedPrecondition);

  HostRows rows = good;
  rows.queries = std::span(row.q).first(8);
  EXPECT_EQ(refused(0, rows, "queries has 8 numbers"), absl::StatusCode::kInvalidArgument);
  rows = good;
  rows.keys = std::span(row.k).first(8);
  EXPECT_EQ(refused(0, rows, "keys has 8 numbers"), absl::StatusCode::kInvalidArgument);
  std::vector<float> poisoned = row.v;
  poisoned[5] = std::numeric_limits<float>::quiet_NaN();
  rows = good;
  rows.values = poisoned;
  EXPECT_EQ(refused(0, rows, "values[5] is nan"), absl::StatusCode::kInvalidArgument);
  poisoned[5] = -std::numeric_limits<float>::infinity();
  EXPECT_EQ(refused(0, rows, "values[5] is -inf"), absl::StatusCode::kInvalidArgument);

  EXPECT_EQ(engine.Kept(2).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine.ReadKv(2, 0, 0, 0).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine.Close(2).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(group_.Attend(0, appends).ok());
  EXPECT_EQ(refused(0, good, "layer is 0, want 1"), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(engine.End().code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(group_.Attend(1, appends).ok());
  EXPECT_EQ(refused(2, good, "want End"), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(group_.End().ok());
  EXPECT_EQ(engine.Kept(2)->report.tokens_seen, 21);
}

TEST_F(RefusalTest, AnAbandonedStepLeavesSequencesAsTheyWereAndBreaksPrompts) {
  const std::vector<Ledger> before = group_.Sets(2, 0);
  const std::vector<EngineAppend> appends = {Append(1, EnginePhase::kPrompt, 10, 5), Token(2, 20)};
  ASSERT_TRUE(group_.Begin(appends).ok());
  ASSERT_TRUE(group_.Attend(0, appends).ok());
  group_.engine().Abandon(absl::CancelledError("no more"));
  EXPECT_EQ(group_.engine().item_status()[1].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(group_.Sets(2, 0), before);
  EXPECT_EQ(group_.engine().Kept(2)->report.tokens_seen, 20);
  EXPECT_EQ(group_.Begin(appends).code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(group_.Step({Token(2, 20)}).ok());
  EXPECT_TRUE(group_.Close(1).ok());
}

TEST(AttentionEngineTest, APromptInStepsHoldsAllLayersWholeUntilItsEnd) {
  TestEngineGroup group({.num_layers = 4});
  const DeviceMemory& memory = group.cache().memory();
  const int64_t idle = memory.reserved_bytes();
  SequenceOptions options = TestSequence(Policy::kH2o, Scope::kLayer, 4, 4, 40);
  ASSERT_TRUE(group.Open(1, options).ok());
  const int64_t one_layer = memory.gauge(MemoryKind::kPromptKv).current_bytes;
  options.prompt_in_steps = true;
  ASSERT_TRUE(group.Open(2, options).ok());
  EXPECT_EQ(memory.gauge(MemoryKind::kPromptKv).current_bytes, 5 * one_layer);
  ASSERT_TRUE(group.Step({Append(2, EnginePhase::kPrompt, 0, 30)}).ok());
  ASSERT_TRUE(group.Step({Append(2, EnginePhase::kPromptLast, 30, 10)}).ok());
  EXPECT_EQ(memory.gauge(MemoryKind::kPromptKv).current_bytes, one_layer);
  ASSERT_TRUE(group.Close(1).ok());
  ASSERT_TRUE(group.Close(2).ok());
  EXPECT_EQ(memory.reserved_bytes(), idle);
  EXPECT_EQ(memory.kv_gauge().current_bytes, 0);
}

TEST(AttentionEngineTest, AnEngineThatBringsRowsHoldsNoneAndTakesNoneFromTheHost) {
  const auto backend = CreateReferenceBackend();
  const auto ranks = CreateLocalGroup(1, absl::Seconds(1));
  RankCacheOptions options{.shape = {.num_layers = 1,
                                     .num_query_heads = 1,
                                     .num_kv_heads = 1,
                                     .total_kv_heads = 1,
                                     .total_query_heads = 1,
                                     .head_dim = 8}};
  const auto holds = RankCache::Create(options, *backend, nullptr);
  options.brings_rows = true;
  const auto brings = RankCache::Create(options, *backend, nullptr);
  ASSERT_TRUE(holds.ok() && brings.ok());
  EXPECT_GE((*holds)->memory().reserved_bytes(),
            (*brings)->memory().reserved_bytes() + 4 * 512 * 8 * int64_t{sizeof(float)});

  AttentionEngine engine(**brings, *ranks[0]);
  ASSERT_TRUE(engine.Open(1, TestSequence(Policy::kFull, Scope::kLayer, 0, 0, 1)).ok());
  const EngineItem item{.sequence = 1, .phase = EnginePhase::kPromptLast};
  ASSERT_TRUE(engine.Begin({&item, 1}).ok());
  std::vector<float> row(8, 1);
  const absl::Status status =
      engine.AttendHost(0, {.queries = row, .keys = row, .values = row, .out = row});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("brings_rows"));
}

TEST(AttentionEngineTest, ASequenceThatOneRankCannotOpenIsOpenOnNone) {
  std::vector<FlakyHostTier> tiers(2);
  TestGroupOptions options{.world_size = 2};
  for (FlakyHostTier& tier : tiers) options.tiers.push_back(&tier);
  TestEngineGroup group(options);
  tiers[1].reserve_status = absl::ResourceExhaustedError("full");
  const SequenceOptions sequence = TestSequence(Policy::kH2o, Scope::kLayer, 4, 4, 20);
  EXPECT_EQ(group.Open(1, sequence).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(group.cache(0).num_sequences(), 0);
  EXPECT_EQ(group.cache(1).num_sequences(), 0);
  tiers[1].reserve_status = absl::OkStatus();
  EXPECT_TRUE(group.Open(1, sequence).ok());
}

TEST(AttentionEngineTest, AnItemThatOneRankCannotRunFailsOnAllAndTheOthersGoOn) {
  std::vector<FlakyHostTier> tiers(2);
  TestGroupOptions options{.world_size = 2, .reserve_ahead_tokens = 0};
  for (FlakyHostTier& tier : tiers) options.tiers.push_back(&tier);
  TestEngineGroup group(options);
  const SequenceOptions sequence = TestSequence(Policy::kH2o, Scope::kLayer, 4, 4, 16);
  SequenceOptions longer = sequence;
  longer.prompt_tokens = 20;  // its page has room
  ASSERT_TRUE(group.Open(1, sequence).ok());
  ASSERT_TRUE(group.Open(2, longer).ok());
  ASSERT_TRUE(group
                  .Step({Append(1, EnginePhase::kPromptLast, 0, 16),
                         Append(2, EnginePhase::kPromptLast, 0, 20)})
                  .ok());
  tiers[1].reserve_status = absl::ResourceExhaustedError("host memory is full");
  const absl::Status status = group.Step({Token(1, 16), Token(2, 20)});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  for (int rank = 0; rank < 2; ++rank) {
    EXPECT_TRUE(group.engine(rank).item_status()[1].ok());
    EXPECT_EQ(group.engine(rank).Kept(1)->report.tokens_seen, 16);
    EXPECT_EQ(group.engine(rank).Kept(2)->report.tokens_seen, 21);
  }
  tiers[1].reserve_status = absl::OkStatus();
  EXPECT_TRUE(group.Step({Token(1, 16), Token(2, 21)}).ok());
}

}  // namespace
}  // namespace heavywater
