// Further turns of a sequence, in a group that writes through to a cache service: each goes on
// as if the text had been appended to the first turn's prompt, whatever lay between.
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/server/test_cache_service.h"
#include "tests/worker/server/test_group.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int kPrompt = 20;
constexpr int kKvHeads = 3;
constexpr int kNew = 6;

std::vector<int32_t> Joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

class TurnTest : public ::testing::Test {
 protected:
  ServerTestGroup::Configure WithCache() {
    return [this](v1::WorkerConfig& config) {
      config.set_cache_address(service_.address());
      config.set_snapshot_interval_tokens(8);
      config.set_page_tokens(16);
    };
  }
  static v1::GenerateRequest First(bool recall, int interval, int new_tokens = 18) {
    v1::GenerateRequest request = Bounded(SomeTokens(kPrompt, 9), new_tokens);
    request.mutable_policy()->set_recall(recall);
    request.mutable_policy()->set_plan_interval_steps(interval);
    return request;
  }
  static Generated Begin(ServerTestGroup& group, const v1::GenerateRequest& request) {
    Generated first = group.Generate(request);
    EXPECT_TRUE(first.status.ok()) << first.status;
    if (first.messages.empty()) first.messages.emplace_back();
    return first;
  }
  // A turn of the sequence with that text.
  static v1::GenerateRequest Turn(const std::vector<int32_t>& text, const Generated& first) {
    v1::GenerateRequest request = MakeRequest(text, kNew);
    request.clear_policy();
    request.set_ignore_eos(true);
    request.set_continue_sequence_id(first.messages[0].sequence_id());
    return request;
  }
  // What the first turn's request would have given with all that follows its prompt as suffix.
  static v1::GenerateRequest AtOnce(v1::GenerateRequest first, const std::vector<int32_t>& text) {
    first.mutable_suffix_tokens()->Assign(text.begin() + kPrompt, text.end());
    first.set_max_new_tokens(kNew);
    first.set_ignore_eos(true);
    return first;
  }
  absl::Status Truncate(SequenceId sequence, int64_t tokens) {
    v1::TruncateSequenceRequest request;
    request.set_sequence_id(sequence);
    request.set_tokens(tokens);
    grpc::ClientContext context;
    v1::TruncateSequenceResponse response;
    const auto status =
        v1::SequenceService::NewStub(service_.Channel())->Truncate(&context, request, &response);
    return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
  }
  int64_t Suspend(SequenceId sequence, int64_t ttl_ms) {
    v1::SuspendSequenceRequest request;
    request.set_sequence_id(sequence);
    request.set_ttl_ms(ttl_ms);
    grpc::ClientContext context;
    v1::SuspendSequenceResponse response;
    const auto status =
        v1::SequenceService::NewStub(service_.Channel())->Suspend(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response.tokens_seen();
  }
  // All ranks have reported its end.
  bool WaitFinished(SequenceId sequence) {
    const absl::Time deadline = absl::Now() + absl::Seconds(10);
    while (!service_.Get(sequence)->finished()) {
      if (absl::Now() > deadline) return false;
      absl::SleepFor(absl::Milliseconds(5));
    }
    return true;
  }
  // Tokens, residents with their scores, and rows in host memory.
  void ExpectSame(const Generated& got, const Generated& want) {
    ASSERT_TRUE(got.status.ok() && want.status.ok()) << got.status << want.status;
    EXPECT_EQ(got.tokens(), want.tokens());
    const SequenceId sequence = got.messages[0].sequence_id();
    const SequenceId other = want.messages[0].sequence_id();
    const auto sets = service_.SetsAt(sequence, got.summary.plan());
    const auto others = service_.SetsAt(other, want.summary.plan());
    ASSERT_EQ(sets.size(), others.size());
    for (size_t i = 0; i < sets.size(); ++i) ExpectSameSet(sets[i], others[i]);
    ASSERT_EQ(got.summary.counts().tokens_seen(), want.summary.counts().tokens_seen());
    for (int64_t position = 0; position < got.summary.counts().tokens_seen(); ++position) {
      ExpectSameRows(sequence, other, position);
    }
  }
  static void ExpectSameSet(const v1::SequenceSet& got, const v1::SequenceSet& want) {
    const auto text = [](const auto& positions) {
      return std::vector<int64_t>(positions.begin(), positions.end());
    };
    EXPECT_EQ(text(got.heavy()), text(want.heavy())) << "layer " << got.layer();
    EXPECT_EQ(text(got.recent()), text(want.recent())) << "layer " << got.layer();
    EXPECT_EQ(text(got.demoted_ranges()), text(want.demoted_ranges())) << "layer " << got.layer();
    ASSERT_EQ(got.scores_size(), want.scores_size());
    for (int i = 0; i < got.scores_size(); ++i) {
      EXPECT_NEAR(got.scores(i), want.scores(i), 1e-4) << "layer " << got.layer() << ", " << i;
    }
  }
  void ExpectSameRows(SequenceId sequence, SequenceId other, int64_t position) {
    for (int head = 0; head < kKvHeads; ++head) {
      const auto row = service_.ReadRow(sequence, 1, head, position);
      ASSERT_TRUE(row.ok()) << row.status();
      EXPECT_EQ(*row, *service_.ReadRow(other, 1, head, position)) << "position " << position;
    }
  }
  static std::string Message(const Generated& refused, absl::StatusCode code) {
    EXPECT_EQ(refused.status.code(), code) << refused.status;
    return std::string(refused.status.message());
  }

  TestCacheService service_;
  TinyModel model_;
};

struct TurnCase {
  int size;
  bool recall;
  int interval;
};

class EveryTurnTest : public TurnTest, public ::testing::WithParamInterface<TurnCase> {};

INSTANTIATE_TEST_SUITE_P(, EveryTurnTest,
                         ::testing::Values(TurnCase{1, false, 1}, TurnCase{1, true, 16},
                                           TurnCase{3, false, 1}, TurnCase{3, true, 1},
                                           TurnCase{3, true, 16}),
                         [](const auto& info) {
                           return absl::StrCat("Tp", info.param.size,
                                               info.param.recall ? "Recall" : "", "Interval",
                                               info.param.interval);
                         });

TEST_P(EveryTurnTest, GoesOnWithTheSlotsScoresAndPagesThatTheSequenceHad) {
  ServerTestGroup group(model_, GetParam().size, WithCache());
  group.Start();
  const v1::GenerateRequest request = First(GetParam().recall, GetParam().interval);
  const Generated first = Begin(group, request);
  const std::vector<int32_t> text =
      Joined(Joined(SomeTokens(kPrompt, 9), first.tokens()), SomeTokens(7, 4));
  const Generated second = group.Generate(Turn(text, first));
  ASSERT_TRUE(second.status.ok()) << second.status;
  EXPECT_EQ(second.messages[0].sequence_id(), first.messages[0].sequence_id());
  ExpectSame(second, group.Generate(AtOnce(request, text)));
  // A third one, as a suffix.
  const std::vector<int32_t> more = Joined(text, second.tokens());
  v1::GenerateRequest third = Turn(more, first);
  for (const int32_t token : SomeTokens(4, 2)) third.add_suffix_tokens(token);
  ExpectSame(group.Generate(third),
             group.Generate(AtOnce(request, Joined(more, SomeTokens(4, 2)))));
}

TEST_P(EveryTurnTest, WithAnotherTextGoesBackToWhereTheyPart) {
  ServerTestGroup group(model_, GetParam().size, WithCache());
  group.Start();
  const v1::GenerateRequest request = First(GetParam().recall, GetParam().interval);
  for (const int kept : {17, 11, 1}) {
    const Generated first = Begin(group, request);
    std::vector<int32_t> answer = first.tokens();
    answer.resize(static_cast<size_t>(kept));
    const std::vector<int32_t> text =
        Joined(Joined(SomeTokens(kPrompt, 9), answer), SomeTokens(7, 4));
    const Generated second = group.Generate(Turn(text, first));
    ASSERT_TRUE(second.status.ok()) << second.status;
    EXPECT_EQ(second.messages[0].sequence_id(), first.messages[0].sequence_id()) << kept;
    ExpectSame(second, group.Generate(AtOnce(request, text)));
  }
}

TEST_P(EveryTurnTest, AfterTruncateGoesOnFromThere) {
  ServerTestGroup group(model_, GetParam().size, WithCache());
  group.Start();
  const v1::GenerateRequest request = First(GetParam().recall, GetParam().interval);
  for (const int64_t tokens : {kPrompt + 10, kPrompt + 3, kPrompt}) {
    const Generated first = Begin(group, request);
    const SequenceId sequence = first.messages[0].sequence_id();
    ASSERT_TRUE(WaitFinished(sequence));
    const int64_t before = service_.Get(sequence)->host_bytes();
    const absl::Status truncated = Truncate(sequence, tokens);
    ASSERT_TRUE(truncated.ok()) << truncated;
    EXPECT_LT(service_.Get(sequence)->host_bytes(), before);
    EXPECT_EQ(service_.Get(sequence)->num_tokens(), tokens);
    std::vector<int32_t> text = Joined(SomeTokens(kPrompt, 9), first.tokens());
    text.resize(static_cast<size_t>(tokens));
    text = Joined(text, SomeTokens(7, 4));
    const Generated second = group.Generate(Turn(text, first));
    ASSERT_TRUE(second.status.ok()) << second.status;
    EXPECT_EQ(second.messages[0].sequence_id(), sequence);
    ExpectSame(second, group.Generate(AtOnce(request, text)));
  }
}

TEST_F(TurnTest, OneThatDoesNotFitItsSequenceIsRefusedNamingTheField) {
  ServerTestGroup group(model_, 1, WithCache());
  group.Start();
  const Generated first = Begin(group, First(false, 1));
  const std::vector<int32_t> text =
      Joined(Joined(SomeTokens(kPrompt, 9), first.tokens()), SomeTokens(7, 4));
  const auto failed = absl::StatusCode::kFailedPrecondition;
  const auto invalid = absl::StatusCode::kInvalidArgument;
  v1::GenerateRequest bad = Turn(text, first);
  *bad.mutable_policy() = First(false, 1).policy();
  bad.mutable_policy()->set_decay(0.5);
  EXPECT_THAT(Message(group.Generate(bad), failed),
              AllOf(HasSubstr("policy"), HasSubstr("decay"), HasSubstr("0.5")));
  bad = Turn(text, first);
  bad.set_tokens(7, text[7] + 1);
  EXPECT_THAT(Message(group.Generate(bad), failed), HasSubstr("tokens[7]"));
  bad = Turn({text.begin(), text.begin() + kPrompt}, first);
  EXPECT_THAT(Message(group.Generate(bad), invalid), HasSubstr("tokens has 20 ids"));
  bad = Turn({text.begin(), text.begin() + 5}, first);
  EXPECT_THAT(Message(group.Generate(bad), invalid), HasSubstr("tokens has 5 ids"));
  bad = Turn(text, first);
  bad.set_text("Once");
  EXPECT_THAT(Message(group.Generate(bad), invalid), HasSubstr("text has 4 bytes"));
  bad = Turn(text, first);
  bad.set_max_new_tokens(1 << 20);
  EXPECT_THAT(Message(group.Generate(bad), absl::StatusCode::kOutOfRange), HasSubstr("context"));
  // Nothing of that has touched it.
  const Generated good = group.Generate(Turn(text, first));
  ASSERT_TRUE(good.status.ok()) << good.status;
  EXPECT_EQ(good.messages[0].sequence_id(), first.messages[0].sequence_id());
}

TEST_F(TurnTest, OneOfAnotherTenantsSequenceIsComputedAnewAsIfThereWereNone) {
  ServerTestGroup group(model_, 1, WithCache());
  group.Start();
  const Generated first = Begin(group, First(false, 1));
  const std::vector<int32_t> text =
      Joined(Joined(SomeTokens(kPrompt, 9), first.tokens()), SomeTokens(7, 4));
  v1::GenerateRequest others = Turn(text, first);
  others.set_tenant("somebody else");
  const Generated second = group.Generate(others);
  ASSERT_TRUE(second.status.ok()) << second.status;
  EXPECT_NE(second.messages[0].sequence_id(), first.messages[0].sequence_id());
  const Generated own = group.Generate(Turn(text, first));
  ASSERT_TRUE(own.status.ok()) << own.status;
  EXPECT_EQ(own.messages[0].sequence_id(), first.messages[0].sequence_id());
}

TEST_F(TurnTest, OneWhoseSequenceIsGoneIsComputedAnew) {
  ServerTestGroup group(model_, 1, WithCache());
  group.Start();
  const Generated first = Begin(group, First(false, 1));
  const std::vector<int32_t> text = Joined(SomeTokens(kPrompt, 9), first.tokens());
  ASSERT_TRUE(service_.Close(first.messages[0].sequence_id()).ok());
  v1::GenerateRequest turn = Turn(text, first);
  *turn.mutable_policy() = First(false, 1).policy();
  const Generated anew = group.Generate(turn);
  ASSERT_TRUE(anew.status.ok()) << anew.status;
  EXPECT_NE(anew.messages[0].sequence_id(), first.messages[0].sequence_id());
  EXPECT_EQ(anew.summary.prompt_tokens(), static_cast<int64_t>(text.size()));
}

TEST_F(TurnTest, OneThatBrokeOffIsResumed) {
  ServerTestGroup group(model_, 1, WithCache());
  group.Start();
  const Generated first = Begin(group, First(true, 16));
  const std::vector<int32_t> text =
      Joined(Joined(SomeTokens(kPrompt, 9), first.tokens()), SomeTokens(7, 4));
  const Generated whole = group.Generate(Turn(text, first));
  v1::GenerateRequest again = Turn(text, first);
  again.mutable_resume()->set_sequence_id(first.messages[0].sequence_id());
  again.mutable_resume()->set_from_token(5);
  for (int i = 0; i < 5; ++i) again.mutable_resume()->add_received_tokens(whole.tokens()[i]);
  const Generated rest = group.Generate(again);
  ASSERT_TRUE(rest.status.ok()) << rest.status;
  ASSERT_EQ(rest.messages.size(), whole.messages.size() - 5);
  for (size_t i = 0; i < rest.messages.size(); ++i) {
    EXPECT_EQ(rest.messages[i].token(), whole.messages[5 + i].token());
    EXPECT_EQ(rest.messages[i].index(), whole.messages[5 + i].index());
  }
}

// A group of one rank whose scheduler the test runs.
Generated RunAlone(ServerTestGroup& group, const v1::GenerateRequest& request) {
  Generated generated;
  const auto running = group.engine().Start(request);
  EXPECT_TRUE(running.ok()) << running.status();
  if (!running.ok()) return generated;
  while (!(*running)->responses.done()) {
    EXPECT_TRUE(group.scheduler().RunOnce().ok());
    while (const auto response = (*running)->responses.Pop(absl::ZeroDuration())) {
      if (!response->has_summary()) generated.messages.push_back(*response);
    }
  }
  group.engine().End(**running, true);
  generated.messages.emplace_back().set_sequence_id((*running)->sequence);
  std::swap(generated.messages.front(), generated.messages.back());
  return generated;
}

TEST_F(TurnTest, OneThatIsCancelledBeforeItReachesTheRanksLeavesItsSequenceAsItWas) {
  ServerTestGroup group(model_, 1, WithCache());
  const Generated first = RunAlone(group, First(false, 1));
  const SequenceId sequence = first.messages[0].sequence_id();
  ASSERT_TRUE(WaitFinished(sequence));
  std::vector<int32_t> text = Joined(SomeTokens(kPrompt, 9), SomeTokens(3, 4));
  for (const bool suspended : {false, true}) {
    SCOPED_TRACE(suspended);
    if (suspended) Suspend(sequence, 600'000);
    const auto turn = group.engine().Start(Turn(text, first));
    ASSERT_TRUE(turn.ok()) << turn.status();
    EXPECT_FALSE(service_.Get(sequence)->finished()) << "it is about to run";
    (*turn)->Cancel(ServedGeneration::CutOff::kByClient);
    ASSERT_TRUE(group.scheduler().RunOnce().ok());
    group.engine().End(**turn, false);
    const auto after = service_.Get(sequence);
    ASSERT_TRUE(after.ok()) << after.status();
    EXPECT_TRUE(after->finished());
    EXPECT_EQ(after->suspended(), suspended);
    if (suspended) {
      EXPECT_GT(after->lease_remaining_ms(), 500'000);
      EXPECT_LE(after->lease_remaining_ms(), 600'000);
    }
    EXPECT_TRUE(Truncate(sequence, kPrompt).ok()) << "it does not run";
  }
}

TEST_F(TurnTest, OneOfASequenceThatRunsWaitsForItsEndAndNoLonger) {
  ServerTestGroup group(model_, 1, WithCache());
  const auto running = group.engine().Start(First(false, 1));
  ASSERT_TRUE(running.ok()) << running.status();
  Generated first;
  first.messages.emplace_back().set_sequence_id((*running)->sequence);
  const std::vector<int32_t> text = SomeTokens(kPrompt + 5, 9);
  const auto busy = group.engine().Start(Turn(text, first));
  EXPECT_TRUE(absl::IsUnavailable(busy.status())) << busy.status();
  EXPECT_FALSE((*running)->responses.cancelled()) << "it is left alone";
  (*running)->Cancel(ServedGeneration::CutOff::kSuspended);
  ASSERT_TRUE(group.scheduler().RunOnce().ok());
  EXPECT_TRUE(absl::IsAborted((*running)->responses.status()));
  group.engine().End(**running, true);
}

}  // namespace
}  // namespace heavywater
