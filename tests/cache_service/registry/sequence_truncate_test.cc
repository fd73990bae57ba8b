// Sequences that go back to an earlier token: by Truncate, or since a turn says so.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/host_page_store.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kPrompt = 20;
constexpr int64_t kTokens = 50;  // seen; states of 20, 30, 40 and 50 were reported

class SequenceTruncateTest : public ::testing::Test {
 protected:
  void SetUp() override {
    registry_.groups().Join(registry_.groups().NewTicket(), TestJoin(0, 1),
                            [this](absl::StatusOr<v1::JoinResponse> joined) {
                              ASSERT_TRUE(joined.ok());
                              epoch_ = joined->epoch();
                            });
    const auto opened = registry_.Open(TestOpen("request", epoch_));
    ASSERT_TRUE(opened.ok()) << opened.status();
    id_ = opened->sequence_id();
    // Four pages of each layer and head, as a rank that streams.
    ASSERT_TRUE(store_.Reserve({.sequence = id_, .heads = {0, 2}, .num_pages = 4}, false).ok());
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) WritePages(layer, head);
    }
    ASSERT_TRUE(store_.Commit(id_, 0, kTokens).ok());
    for (int64_t plan = 1; plan <= 4; ++plan) Report(plan, plan == 4);
  }
  void WritePages(int layer, int head) {
    const std::vector<std::byte> row(256, std::byte{7});
    for (int64_t position = 0; position < kTokens; ++position) {
      ASSERT_TRUE(store_.Write(0, {id_, layer, head, position, 1}, row).ok());
    }
  }
  void Report(int64_t plan, bool finished, int32_t incarnation = 0) {
    v1::ReportPlanRequest request = TestFinished(epoch_, id_, static_cast<int>(10 + 10 * plan));
    v1::PlanReport& report = *request.mutable_reports(0);
    report.set_plan(plan);
    report.set_finished(finished);
    report.set_incarnation(incarnation);
    AddTestState(10 + 10 * plan, report);
    ASSERT_TRUE(registry_.ReportPlan(request).ok());
  }
  absl::StatusOr<v1::TruncateSequenceResponse> Truncate(int64_t tokens) {
    v1::TruncateSequenceRequest request;
    request.set_sequence_id(id_);
    request.set_tokens(tokens);
    return registry_.sequences().Truncate(request);
  }
  // A turn that has the first `same` tokens, and three others then.
  v1::ReopenSequenceRequest Turn(int64_t same) const {
    v1::ReopenSequenceRequest request = TestReopen(TestOpen("request", epoch_), id_, epoch_);
    request.set_extends(true);
    request.set_max_tokens_seen(same + 2);
    for (int64_t token = 0; token < same; ++token) request.add_tokens(100 + token);
    for (int i = 0; i < 3; ++i) request.add_tokens(7);
    return request;
  }
  int64_t num_tokens() { return registry_.sequences().Get(id_)->num_tokens(); }

  FakeClock clock_;
  HostPageStore store_{*Slab::Create("", 40 * 4096)};
  Registry registry_{RegistryOptions(), store_, clock_};
  Epoch epoch_ = 0;
  SequenceId id_ = 0;
};

TEST_F(SequenceTruncateTest, WhatCameLaterIsForgottenAndItsPagesAreFree) {
  const int64_t before = store_.Stats().used_bytes;
  const auto truncated = Truncate(32);
  ASSERT_TRUE(truncated.ok()) << truncated.status();
  EXPECT_EQ(truncated->tokens_seen(), 20) << "the first state; the last two are of 40 and 50";
  EXPECT_EQ(num_tokens(), 32);
  EXPECT_EQ(store_.Watermark(id_, 0), 32);
  EXPECT_EQ(store_.Stats().used_bytes, before - 2 * 4 * 4096) << "the third and fourth page";
  std::vector<std::byte> row(256);
  EXPECT_TRUE(store_.Read({id_, 1, 1, 31, 1}, row).ok());
  EXPECT_FALSE(store_.Read({id_, 1, 1, 32, 1}, row).ok());
  // Again, and further.
  EXPECT_TRUE(Truncate(32).ok());
  EXPECT_TRUE(Truncate(kPrompt).ok());
  EXPECT_EQ(num_tokens(), kPrompt);
}

TEST_F(SequenceTruncateTest, OnesThatAreOutOfRangeNameTheRangeAndChangeNothing) {
  for (const int64_t tokens : {int64_t{-1}, int64_t{0}, kPrompt - 1, kTokens + 1}) {
    const auto refused = Truncate(tokens);
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kOutOfRange);
    EXPECT_THAT(std::string(refused.status().message()),
                AllOf(HasSubstr(absl::StrCat("tokens is ", tokens)), HasSubstr("from 20"),
                      HasSubstr("to 50")));
  }
  EXPECT_EQ(num_tokens(), kTokens);
  const auto all = Truncate(kTokens);
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_EQ(all->tokens_seen(), kTokens);
}

TEST_F(SequenceTruncateTest, OneThatRunsIsLeftAlone) {
  ASSERT_TRUE(registry_.Reopen(Turn(kTokens)).ok());
  const auto running = Truncate(32);
  EXPECT_EQ(running.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(running.status().message()), HasSubstr("runs"));
  v1::HeartbeatRequest heartbeat;
  heartbeat.set_group("group");
  heartbeat.set_epoch(epoch_);
  heartbeat.add_sequence_ids(id_);
  clock_.Advance(absl::Seconds(4));
  ASSERT_TRUE(registry_.Heartbeat(heartbeat).ok());
  clock_.Advance(absl::Seconds(4));
  EXPECT_FALSE(Truncate(32).ok()) << "its rank was heard of";
  clock_.Advance(absl::Seconds(2));
  EXPECT_TRUE(Truncate(32).ok()) << "its rank has died";
}

TEST_F(SequenceTruncateTest, AnUnknownOneAndOneWithoutAStateAreRefused) {
  v1::TruncateSequenceRequest unknown;
  unknown.set_sequence_id(id_ + 9);
  EXPECT_EQ(registry_.sequences().Truncate(unknown).status().code(), absl::StatusCode::kNotFound);
  id_ = registry_.Open(TestOpen("other", epoch_))->sequence_id();
  v1::ReportPlanRequest request = TestFinished(epoch_, id_, 24);
  for (int32_t token = 0; token < 24; ++token) request.mutable_reports(0)->add_tokens(token);
  ASSERT_TRUE(registry_.ReportPlan(request).ok());
  const auto refused = Truncate(22);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("no committed state"));
}

TEST_F(SequenceTruncateTest, ATurnWithAnotherTextGoesBackToWhereTheyPart) {
  const auto reopened = registry_.Reopen(Turn(44));
  ASSERT_TRUE(reopened.ok()) << reopened.status();
  EXPECT_EQ(reopened->tokens_seen(), 40);
  EXPECT_EQ(reopened->known_tokens(), 44);
  EXPECT_EQ(num_tokens(), 44);
  EXPECT_EQ(store_.Watermark(id_, 0), 44) << "what was written behind is of another text";
}

TEST_F(SequenceTruncateTest, ATurnWithAnotherPromptIsRefusedNamingTheToken) {
  const auto reopened = registry_.Reopen(Turn(kPrompt - 1));
  EXPECT_EQ(reopened.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(reopened.status().message()),
              AllOf(HasSubstr("tokens[19] is 7"), HasSubstr("119")));
  EXPECT_EQ(num_tokens(), kTokens);
}

TEST_F(SequenceTruncateTest, AfterItReportsGoOnFromThere) {
  ASSERT_TRUE(Truncate(45).ok());
  const auto reopened = registry_.Reopen(Turn(45));
  ASSERT_TRUE(reopened.ok()) << reopened.status();
  EXPECT_EQ(reopened->plan(), 3);
  Report(4, true, reopened->incarnation());
  EXPECT_EQ(num_tokens(), kTokens);
  EXPECT_TRUE(registry_.sequences().Get(id_)->finished());
}

}  // namespace
}  // namespace heavywater
