#include "worker/rank/decode_step.h"

#include <algorithm>
#include <string>
#include <vector>

#include "cache_service/tier/local_host_tier.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/plain_sequence.h"
#include "tests/worker/rank/test_group.h"
#include "worker/rank/sequence_cache.h"
#include "worker/rank/sequence_memory.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr absl::StatusCode kFailedPrecondition = absl::StatusCode::kFailedPrecondition;

// Everything of a sequence that a failed step must leave as it was.
struct State {
  std::vector<std::vector<Ledger>> sets;
  int64_t seen = 0;
  uint64_t hash = 0;
  bool operator==(const State&) const = default;
};

State StateOf(TestGroup& group, SequenceId sequence) {
  State state;
  for (int layer = 0; layer < group.options().num_layers; ++layer) {
    state.sets.push_back(group.Sets(sequence, layer));
  }
  state.seen = group.cache().Stats(sequence)->tokens_seen;
  state.hash = group.cache().Report(sequence, false)->hash;
  return state;
}

class DecodeStepTest : public ::testing::Test {
 protected:
  void Start(int world_size, Scope scope = Scope::kLayer, int interval = 1) {
    TestGroupOptions options;
    options.world_size = world_size;
    options.kv_heads = 2;
    options.query_heads = 4;
    group_ = std::make_unique<TestGroup>(options);
    for (SequenceId id : {1, 2}) {
      SequenceOptions sequence = TestSequence(Policy::kSnapKvH2o, scope, 8, 8, 30);
      sequence.policy.plan_interval_steps = interval;
      plain_.emplace_back(*group_, sequence.policy);
      plain_.back().Prompt(TestTokens(static_cast<int>(id), 30));
      ASSERT_TRUE(
          group_->OpenAndRunPrompt(id, sequence, TestTokens(static_cast<int>(id), 30)).ok());
    }
  }

  TestAppend Next(SequenceId id, int64_t count = 1) {
    const int64_t seen = group_->cache().Stats(id)->tokens_seen;
    return {id, TestTokens(static_cast<int>(id), count, seen)};
  }

  // The status of every rank when `tamper` changes what ranks contribute.
  std::vector<absl::Status> ItemStatusWith(
      const StepDescriptor& descriptor,
      std::function<void(std::vector<DeviceSpan<int64_t>>&)> tamper) {
    group_->tamper = std::move(tamper);
    const absl::Status status = group_->RunStep(descriptor);
    group_->tamper = nullptr;
    std::vector<absl::Status> statuses;
    for (int rank = 0; rank < group_->world_size(); ++rank) {
      statuses.push_back(status.ok() ? group_->step(rank).item_status()[0] : status);
    }
    return statuses;
  }

  // The sequence goes on as if nothing had happened.
  void ExpectGoesOn(SequenceId id) {
    PlainSequence& plain = plain_[id - 1];
    for (int i = 0; i < 3; ++i) {
      plain.Append(Next(id).tokens);
      ASSERT_TRUE(group_->Append({Next(id)}).ok());
      EXPECT_EQ(plain.Compare(*group_, id, 1000), "");
    }
  }

  std::unique_ptr<TestGroup> group_;
  std::vector<PlainSequence> plain_;
};

int64_t HeaderSize(int world_size, int num_items) {
  return (kStepFields + kItemFields * num_items) * world_size;
}

// Sets what rank 1 contributes to the scores to zero.
void ZeroScoresOfRank1(std::vector<DeviceSpan<int64_t>>& buffers) {
  const int64_t header = HeaderSize(static_cast<int>(buffers.size()), 1);
  std::fill_n(buffers[1].device_address() + header, buffers[1].size() - header, 0);
}

TEST_F(DecodeStepTest, ARankWhoseContributionIsMissingIsNoticedByEveryRank) {
  Start(2);
  const State before = StateOf(*group_, 1);
  for (const absl::Status& status :
       ItemStatusWith(group_->Describe({Next(1)}), ZeroScoresOfRank1)) {
    EXPECT_EQ(status.code(), kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("sequence 1"));
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("attention received in layer 0, set 0 sums to 2, want 4"));
  }
  EXPECT_EQ(StateOf(*group_, 1), before);
  ExpectGoesOn(1);
}

TEST_F(DecodeStepTest, AMissingContributionIsNoticedWhereRanksShareAKvHead) {
  Start(4, Scope::kKvHead);
  const State before = StateOf(*group_, 1);
  for (const absl::Status& status :
       ItemStatusWith(group_->Describe({Next(1)}), ZeroScoresOfRank1)) {
    EXPECT_EQ(status.code(), kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("sums to 1, want 2"));
  }
  EXPECT_EQ(StateOf(*group_, 1), before);
  ExpectGoesOn(1);
}

TEST_F(DecodeStepTest, GainsOfOneRankAloneThatAreWrongFailTheItemOnEveryRank) {
  Start(2, Scope::kKvHead);  // a KV head each: no gains are reduced
  const State before = StateOf(*group_, 1);
  const LayerView layer = (*group_->cache(1).Find(1))->View(1);
  layer.gains.device_address()[3] += int64_t{1} << 32;
  const StepDescriptor descriptor = group_->Describe({Next(1), Next(2)});
  const std::vector<absl::Status> statuses = ItemStatusWith(descriptor, nullptr);
  EXPECT_THAT(std::string(statuses[0].message()), HasSubstr("rank 1 reports FAILED_PRECONDITION"));
  EXPECT_THAT(std::string(statuses[1].message()), HasSubstr("layer 1, set 0 sums to 3, want 2"));
  EXPECT_TRUE(group_->step(0).item_status()[1].ok());
  EXPECT_EQ(StateOf(*group_, 1), before);
  ExpectGoesOn(1);
}

TEST_F(DecodeStepTest, ScoresOfOneLayerThatAreMissingNameTheLayer) {
  Start(2);
  const std::vector<absl::Status> statuses =
      ItemStatusWith(group_->Describe({Next(1)}), [](std::vector<DeviceSpan<int64_t>>& buffers) {
        const int64_t layer = (buffers[0].size() - HeaderSize(2, 1)) / 2;
        std::fill_n(buffers[0].device_address() + buffers[0].size() - layer, layer, 0);
      });
  EXPECT_THAT(std::string(statuses[1].message()), HasSubstr("layer 1"));
}

TEST_F(DecodeStepTest, ADifferingPlanHashIsNamedWithBothValuesOnEveryRank) {
  Start(2);
  const State before = StateOf(*group_, 1);
  const std::vector<absl::Status> statuses =
      ItemStatusWith(group_->Describe({Next(1)}), [](std::vector<DeviceSpan<int64_t>>& buffers) {
        int64_t* hashes = buffers[1].device_address() + HeaderSize(2, 1) - 2;
        hashes[1] = 77;
      });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()), HasSubstr("hash of the previous plan is "));
    EXPECT_THAT(std::string(status.message()), HasSubstr("on rank 0 and 77 on rank 1"));
  }
  EXPECT_EQ(StateOf(*group_, 1), before);
  ExpectGoesOn(1);
}

TEST_F(DecodeStepTest, RanksInDifferentStepsFailTheStepNamingBoth) {
  Start(2);
  const State before = StateOf(*group_, 1);
  const std::vector<absl::Status> statuses = ItemStatusWith(
      group_->Describe({Next(1)}),
      [](std::vector<DeviceSpan<int64_t>>& buffers) { buffers[1].device_address()[1] = 9; });
  for (const absl::Status& status : statuses) {
    EXPECT_EQ(status.code(), kFailedPrecondition);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("step number is 0 on rank 0 and 9 on rank 1"));
  }
  EXPECT_EQ(StateOf(*group_, 1), before);
  ExpectGoesOn(1);
}

TEST_F(DecodeStepTest, AnotherRanksFailureFailsTheItemHereAndOthersGoOn) {
  Start(2);
  const State before = StateOf(*group_, 1);
  const std::vector<absl::Status> statuses = ItemStatusWith(
      group_->Describe({Next(1), Next(2)}), [](std::vector<DeviceSpan<int64_t>>& buffers) {
        int64_t* status = buffers[1].device_address() + 2 * 2;
        status[1] = static_cast<int64_t>(absl::StatusCode::kResourceExhausted);
      });
  EXPECT_EQ(statuses[0].code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(statuses[0].message()),
              HasSubstr("sequence 1: rank 1 reports RESOURCE_EXHAUSTED"));
  EXPECT_EQ(StateOf(*group_, 1), before);
  EXPECT_TRUE(group_->step(0).item_status()[1].ok());
  EXPECT_EQ(group_->cache().Stats(2)->tokens_seen, 31);
  ExpectGoesOn(1);
}

TEST_F(DecodeStepTest, AFailedStepBetweenPlansLeavesSetsScoresAndAgreement) {
  Start(2, Scope::kLayer, /*interval=*/4);
  ASSERT_TRUE(group_->Append({Next(1)}).ok());
  const State before = StateOf(*group_, 1);
  ItemStatusWith(group_->Describe({Next(1)}), [](std::vector<DeviceSpan<int64_t>>& buffers) {
    buffers[0].device_address()[2 * 2] = static_cast<int64_t>(absl::StatusCode::kInternal);
  });
  EXPECT_EQ(StateOf(*group_, 1), before);
  for (int i = 0; i < 9; ++i) ASSERT_TRUE(group_->Append({Next(1)}).ok());
  EXPECT_EQ(group_->cache().Stats(1)->plans, 2);
  EXPECT_LE(group_->cache().Stats(1)->tokens_resident, 16 + 3);
}

TEST_F(DecodeStepTest, ItemsThatCannotRunSayWhyAndChangeNothing) {
  Start(1);
  const State before = StateOf(*group_, 1);
  StepDescriptor descriptor = group_->Describe({Next(2)});
  descriptor.items.push_back({.sequence = 9});
  descriptor.items.push_back({.sequence = 1, .first_position = 29});
  descriptor.tokens = {1, 2, 3};
  ASSERT_TRUE(group_->RunStep(descriptor).ok());
  const std::span<const absl::Status> status = group_->step().item_status();
  EXPECT_TRUE(status[0].ok()) << status[0];
  EXPECT_EQ(status[1].code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status[1].message()), HasSubstr("sequence 9"));
  EXPECT_EQ(status[2].code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status[2].message()),
              HasSubstr("first_position is 29, want tokens_seen, 30"));
  EXPECT_EQ(StateOf(*group_, 1), before);
}

TEST_F(DecodeStepTest, ASequenceWithoutItsPromptOrBeyondItsMaximumIsRefused) {
  Start(1);
  ASSERT_TRUE(group_->Open(3, TestSequence(Policy::kFull, Scope::kLayer, 1, 1, 5, 1)).ok());
  EXPECT_EQ(group_->Append({{3, {1}}}).code(), kFailedPrecondition);
  ASSERT_TRUE(group_->RunPrompt(3, TestTokens(3, 5)).ok());
  EXPECT_TRUE(group_->Append({{3, {1}}}).ok());
  const absl::Status status = group_->Append({{3, {1}}});
  EXPECT_EQ(status.code(), absl::StatusCode::kOutOfRange);
  EXPECT_THAT(std::string(status.message()), HasSubstr("want at most max_tokens, 6"));
}

TEST_F(DecodeStepTest, StepsOfWrongSizesAreRefusedAtOnce) {
  Start(1);
  const State before = StateOf(*group_, 1);
  struct Row {
    StepDescriptor descriptor;
    const char* error;
  };
  const StepItem item = {.sequence = 1, .first_position = 30};
  StepItem none = item;
  none.num_tokens = 0;
  StepItem many = item;
  many.num_tokens = 65;
  const Row rows[] = {
      {{.step = 5}, "step 5 has 0 tokens, want 1 to 64"},
      {{.step = 5, .items = {item}, .tokens = {1, 2}}, "brings 2 tokens, want 1"},
      {{.step = 5, .items = {none}}, "num_tokens of sequence 1 is 0"},
      {{.step = 5, .items = {item, item}, .tokens = {1, 2}}, "sequence 1 is twice in step 5"},
      {{.step = 5, .items = {many}, .tokens = std::vector<int32_t>(65)}, "has 65 tokens, want 1"},
  };
  for (const Row& row : rows) {
    const absl::Status status = group_->RunStep(row.descriptor);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(row.error));
  }
  EXPECT_EQ(StateOf(*group_, 1), before);
}

TEST_F(DecodeStepTest, LogitsAreOfTheLastTokenOrOfAll) {
  Start(1);
  StepDescriptor descriptor = group_->Describe({Next(1, 3), Next(2, 2)});
  descriptor.items[1].all_logits = true;
  ASSERT_TRUE(group_->RunStep(descriptor).ok());
  const DeviceSpan<const float> last = group_->step().logits(0);
  const DeviceSpan<const float> all = group_->step().logits(1);
  ASSERT_EQ(last.size(), 8);
  ASSERT_EQ(all.size(), 16);
  EXPECT_EQ(last.device_address()[3], 10.0f * static_cast<float>(descriptor.tokens[2]) + 3);
  EXPECT_EQ(all.device_address()[0], 10.0f * static_cast<float>(descriptor.tokens[3]));
  EXPECT_EQ(all.device_address()[8], 10.0f * static_cast<float>(descriptor.tokens[4]));
}

TEST_F(DecodeStepTest, ALongAppendInPartsWithoutPlansEqualsOneWhole) {
  Start(2);
  PlainSequence& plain = plain_[0];
  const std::vector<int32_t> turn = TestTokens(1, 90, 30);
  plain.Append(turn, /*plan_due=*/true);
  for (int done = 0; done < 90; done += 45) {
    StepDescriptor descriptor =
        group_->Describe({{1, {turn.begin() + done, turn.begin() + done + 45}}});
    descriptor.items[0].plan_due = done > 0;
    ASSERT_TRUE(group_->RunStep(descriptor).ok());
    ASSERT_TRUE(group_->step().item_status()[0].ok()) << group_->step().item_status()[0];
  }
  EXPECT_EQ(plain.Compare(*group_, 1, 4000), "");
  ExpectGoesOn(1);
}

TEST_F(DecodeStepTest, AnAppendTakesMoreSlotsUntilThePlanAndGivesThemBack) {
  Start(1);
  const int64_t reserved = group_->cache().memory().reserved_bytes();
  const int64_t bytes = group_->cache().Stats(1)->device_bytes;
  ASSERT_TRUE(group_->Append({Next(1, 40)}).ok());
  EXPECT_EQ(group_->cache().Stats(1)->tokens_resident, 16);
  EXPECT_EQ(group_->cache().Stats(1)->device_bytes, bytes);
  EXPECT_GT(group_->cache().Stats(1)->peak_device_bytes_after_prompt, 2 * bytes);
  EXPECT_EQ(group_->cache().memory().reserved_bytes(), reserved);
}

TEST_F(DecodeStepTest, AnAppendThatDoesNotFitTheDeviceIsRefusedAndChangesNothing) {
  TestGroupOptions options;
  options.device_memory_bytes = 60000;
  group_ = std::make_unique<TestGroup>(options);
  const SequenceOptions sequence = TestSequence(Policy::kH2o, Scope::kLayer, 8, 8, 30, 1000);
  plain_.emplace_back(*group_, sequence.policy);
  plain_[0].Prompt(TestTokens(1, 30));
  ASSERT_TRUE(group_->OpenAndRunPrompt(1, sequence, TestTokens(1, 30)).ok());
  DeviceMemory& memory = group_->cache().mutable_memory();
  const DeviceMemory::Reservation rest = *memory.Reserve(memory.free_bytes() - 100, "the rest");
  const State before = StateOf(*group_, 1);
  const absl::Status status = group_->Append({Next(1, 60)});
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("limit 60000"));
  EXPECT_EQ(StateOf(*group_, 1), before);
  ExpectGoesOn(1);
}

TEST_F(DecodeStepTest, SequencesJoinAndLeaveBetweenSteps) {
  Start(1);
  ASSERT_TRUE(group_->Append({Next(1), Next(2)}).ok());
  ASSERT_TRUE(group_->Close(1).ok());
  EXPECT_EQ(group_->Append({{1, {5}}}).code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(group_->Append({Next(2)}).ok());
  ASSERT_TRUE(group_
                  ->OpenAndRunPrompt(1, TestSequence(Policy::kFull, Scope::kLayer, 1, 1, 10),
                                     TestTokens(5, 10))
                  .ok());
  ASSERT_TRUE(group_->Append({Next(2), Next(1)}).ok());
  EXPECT_EQ(group_->cache().Stats(1)->tokens_resident, 11);
}

}  // namespace
}  // namespace heavywater
