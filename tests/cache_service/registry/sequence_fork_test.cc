// One sequence becomes two.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cache_service/base/shortage.h"
#include "tests/cache_service/registry/share_fixture.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

class SequenceForkTest : public ShareFixture {
 protected:
  absl::StatusOr<v1::ForkSequenceResponse> Fork(SequenceId id,
                                                const std::string& request_id = "fork",
                                                const Viewer& viewer = Viewer::All()) {
    v1::ForkSequenceRequest request;
    request.set_sequence_id(id);
    request.set_request_id(request_id);
    return registry_.sequences().Fork(request, viewer);
  }
  v1::Sequence Get(SequenceId id) { return *registry_.sequences().Get(id); }
};

TEST_F(SequenceForkTest, BothHaveTheSameTokensStatesAndPages) {
  const SequenceId parent = Make(100);
  const int64_t before = UsedBytes();
  const auto forked = Fork(parent);
  ASSERT_TRUE(forked.ok()) << forked.status();
  EXPECT_NE(forked->sequence_id(), parent);
  EXPECT_EQ(forked->tokens_seen(), 45);
  EXPECT_EQ(forked->shared_tokens(), 48);
  EXPECT_EQ(forked->lease_ms(), 60'000);
  EXPECT_EQ(UsedBytes(), before + kPageRow + 4096) << "the open page and its watermarks";
  v1::Sequence child = Get(forked->sequence_id());
  EXPECT_EQ(child.num_tokens(), kTokens);
  EXPECT_EQ(child.tokens(7), 107);
  EXPECT_TRUE(child.finished());
  EXPECT_EQ(child.prompt_tokens(), kPrompt);
  std::vector<std::byte> row(256);
  ASSERT_TRUE(store_.Read({forked->sequence_id(), 1, 0, kTokens - 1, 1}, row).ok());
  EXPECT_EQ(row[0], std::byte{100});
}

TEST_F(SequenceForkTest, TheParentsEndLeavesTheChildAndOneMayBeForkedAgain) {
  const SequenceId parent = Make(100);
  const SequenceId child = Fork(parent)->sequence_id();
  Close(parent);
  const auto again = Fork(child);
  ASSERT_TRUE(again.ok()) << again.status();
  Close(child);
  v1::ReopenSequenceRequest turn = TestReopen(Request(100), again->sequence_id(), epoch_);
  for (int i = 0; i < kTokens; ++i) turn.add_tokens(100 + i);
  turn.set_max_tokens_seen(kTokens - 1);
  turn.set_extends(true);
  const auto reopened = registry_.Reopen(turn);
  ASSERT_TRUE(reopened.ok()) << reopened.status();
  EXPECT_EQ(reopened->tokens_seen(), 45);
  EXPECT_EQ(reopened->known_tokens(), kTokens);
  Close(again->sequence_id());
  registry_.Tick();
  EXPECT_EQ(UsedBytes(), 0);
}

TEST_F(SequenceForkTest, AReplayGetsTheFirstAnswerAlsoAfterARestart) {
  const SequenceId parent = Make(100);
  const auto first = Fork(parent);
  EXPECT_EQ(Fork(parent)->sequence_id(), first->sequence_id());
  EXPECT_NE(Fork(parent, "other")->sequence_id(), first->sequence_id());
  v1::ForkSequenceRequest longer;
  longer.set_sequence_id(parent);
  longer.set_request_id("fork");
  longer.set_lease_ms(1000);
  const auto refused = registry_.sequences().Fork(longer);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kAlreadyExists);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("with lease_ms 0, not 1000"));
  SequenceRegistry next(options_, store_, clock_, &state_);
  ASSERT_TRUE(next.Restore({parent, first->sequence_id()}).ok());
  longer.set_lease_ms(0);
  const auto replayed = next.Fork(longer);
  ASSERT_TRUE(replayed.ok()) << replayed.status();
  EXPECT_EQ(replayed->sequence_id(), first->sequence_id());
  EXPECT_EQ(replayed->shared_tokens(), 48);
}

TEST_F(SequenceForkTest, OtherTenantsAreUnknownAndTheirReplaysAreTheirOwn) {
  const SequenceId parent = Make(100, "mine");
  const auto first = Fork(parent, "fork", Viewer::Tenant("mine"));
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(Get(first->sequence_id()).tenant(), "mine");
  EXPECT_EQ(Fork(parent, "fork", Viewer::Tenant("theirs")).status().code(),
            absl::StatusCode::kNotFound);
  EXPECT_EQ(Fork(parent, "x", Viewer::Tenant("theirs")).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(SequenceForkTest, OneThatRunsOrHasNoStateIsRefused) {
  const SequenceId id = Open(Request(100)).sequence_id();
  EXPECT_THAT(std::string(Fork(id).status().message()), HasSubstr("runs, want one that has ended"));
  EXPECT_EQ(Fork(id).status().code(), absl::StatusCode::kFailedPrecondition);
  Report(id, 100, 1, kTokens);  // without a state
  EXPECT_THAT(std::string(Fork(id).status().message()), HasSubstr("has no committed state yet"));
  EXPECT_EQ(Fork(999).status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(Fork(id, "").status().message()), HasSubstr("request_id"));
}

TEST_F(SequenceForkTest, WithoutRoomOthersEndAndNotTheParent) {
  const SequenceId parent = Make(100);
  const SequenceId other = Make(200);
  const SequenceId third = Make(300);
  // 3 x 17 pages of 200, and a promise: room for one fork of five.
  v1::OpenSequenceRequest large = Request(400);
  large.set_prompt_tokens(16 * 35);
  Open(large);
  clock_.Advance(absl::Seconds(1));
  ASSERT_TRUE(Fork(parent).ok());
  const auto forked = Fork(parent, "again");
  ASSERT_TRUE(forked.ok()) << forked.status();
  EXPECT_FALSE(registry_.sequences().Get(other).ok());
  EXPECT_TRUE(registry_.sequences().Get(third).ok());
  EXPECT_TRUE(registry_.sequences().Get(parent).ok());
}

TEST_F(SequenceForkTest, AChildsPromptCanBeBegunWith) {
  const SequenceId parent = Make(100);
  const auto forked = Fork(parent);
  Close(parent);
  EXPECT_EQ(Open(Request(100)).prefix_tokens(), 32);
  Close(forked->sequence_id());
}

TEST_F(SequenceForkTest, DamagedPagesAreDataLoss) {
  const SequenceId parent = Make(100);
  const auto reserved =
      store_.Reserve({.sequence = parent, .heads = {0, 2}, .num_pages = 4}, false);
  *store_.slab().At(reserved->offsets[1]) ^= std::byte{1};
  const auto forked = Fork(parent);
  EXPECT_EQ(forked.status().code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(forked.status().message()),
              HasSubstr("page 1 of sequence 1, layer 0, kv_head 0 is damaged"));
  EXPECT_EQ(store_.Stats().sequences, 1);
}

// The last token of a text is known, and often not stored: no rank has read it.
TEST_F(SequenceForkTest, ATokenAtThePagesEndThatIsNotStoredIsNotWaitedFor) {
  const SequenceId parent = Open(Request(100)).sequence_id();
  ASSERT_TRUE(store_.Reserve({.sequence = parent, .heads = {0, 2}, .num_pages = 3}, false).ok());
  const std::vector<std::byte> rows(15 * 256, std::byte{7});
  for (int of_page = 0; of_page < 4; ++of_page) {
    for (int64_t page = 0; page < 3; ++page) {
      for (int64_t row = 0; row < (page < 2 ? 16 : 15); ++row) {
        ASSERT_TRUE(store_
                        .Write(0, {parent, of_page / 2, of_page % 2, page * 16 + row, 1},
                               std::span(rows).first(256))
                        .ok());
      }
    }
  }
  ASSERT_TRUE(store_.Commit(parent, 0, 47).ok());
  v1::ReportPlanRequest request = TestFinished(epoch_, parent, 47);
  AddTestState(47, *request.mutable_reports(0));
  request.mutable_reports(0)->add_tokens(147);
  ASSERT_TRUE(registry_.ReportPlan(request).ok());
  const auto forked = Fork(parent);
  ASSERT_TRUE(forked.ok()) << forked.status();
  EXPECT_EQ(forked->tokens_seen(), 47);
  EXPECT_EQ(forked->shared_tokens(), 32);
}

TEST_F(SequenceForkTest, StatesThatBothGoOnFromCountOnce) {
  const SequenceId parent = Make(100);
  const int64_t before = registry_.sequences().snapshot_bytes();
  ASSERT_GT(before, 0);
  const SequenceId child = Fork(parent)->sequence_id();
  EXPECT_EQ(registry_.sequences().snapshot_bytes(), before);
  Close(parent);
  EXPECT_EQ(registry_.sequences().snapshot_bytes(), before);
  Close(child);
  EXPECT_EQ(registry_.sequences().snapshot_bytes(), 0);
}

absl::Status FullBy(int64_t need) {
  return ExhaustedError(
      "full",
      {.subject = "host_bytes", .need = need, .available = 0, .limit = int64_t{200} * 4096});
}

TEST_F(SequenceForkTest, WhatOthersHoldTooIsNoRoomThatItsEndWouldMake) {
  const SequenceId parent = Make(100);
  const SequenceId child = Fork(parent)->sequence_id();
  v1::SuspendSequenceRequest suspend;
  suspend.set_sequence_id(child);
  ASSERT_TRUE(registry_.sequences().Suspend(suspend).ok());
  // Of its four rows of pages three are the child's, too, which stays.
  const absl::Status refused = registry_.sequences().MakeRoom(FullBy(2 * kPageRow));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(registry_.sequences().FindOwner(parent).ok()) << "ended in vain";
  const int64_t before = UsedBytes();
  EXPECT_TRUE(registry_.sequences().MakeRoom(FullBy(kPageRow)).ok());
  EXPECT_FALSE(registry_.sequences().FindOwner(parent).ok());
  EXPECT_GE(before - UsedBytes(), kPageRow);
}

TEST_F(SequenceForkTest, WhatTwoFinishedOnesShareIsRoomOnceBothHaveEnded) {
  const SequenceId parent = Make(100);
  const SequenceId child = Fork(parent)->sequence_id();
  ASSERT_TRUE(registry_.sequences().MakeRoom(FullBy(4 * kPageRow)).ok());
  EXPECT_FALSE(registry_.sequences().FindOwner(parent).ok());
  EXPECT_FALSE(registry_.sequences().FindOwner(child).ok());
  EXPECT_EQ(UsedBytes(), 0);
}

}  // namespace
}  // namespace heavywater
