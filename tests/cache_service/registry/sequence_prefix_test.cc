// Prompts that begin with stored pages of others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/cache_service/registry/share_fixture.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

class SequencePrefixTest : public ShareFixture {};

TEST_F(SequencePrefixTest, WholePagesOfAPromptThatBeginsAlikeAreStoredAlready) {
  Make(100);
  const int64_t before = UsedBytes();
  const v1::OpenSequenceResponse opened = Open(Request(100));
  EXPECT_EQ(opened.prefix_tokens(), 32);
  EXPECT_EQ(UsedBytes(), before + 4096) << "its watermarks";
  EXPECT_EQ(Open(Request(101)).prefix_tokens(), 0);
  v1::OpenSequenceRequest some = Request(100);
  some.mutable_prefix()->set_max_tokens(31);
  EXPECT_EQ(Open(some).prefix_tokens(), 16);
  some = Request(100);
  some.mutable_prefix()->set_tokens(20, 7);
  EXPECT_EQ(Open(some).prefix_tokens(), 16);
  some = Request(100);
  some.clear_prefix();
  EXPECT_EQ(Open(some).prefix_tokens(), 0);
  const auto stats = registry_.sequences().prefix_stats();
  EXPECT_EQ(stats.lookups, 5);
  EXPECT_EQ(stats.hits, 3);
  EXPECT_EQ(stats.tokens, 64);
  EXPECT_EQ(stats.indexed_pages, 2);
}

TEST_F(SequencePrefixTest, OnlyThePromptIsFoundNotWhatFollowedIt) {
  Make(100);
  v1::OpenSequenceRequest longer = Request(100);
  for (int i = kPrompt; i < 60; ++i) longer.mutable_prefix()->add_tokens(100 + i);
  longer.set_prompt_tokens(60);
  longer.mutable_prefix()->set_max_tokens(59);
  EXPECT_EQ(Open(longer).prefix_tokens(), 32) << "the third page was filled by decoding";
}

TEST_F(SequencePrefixTest, OneThatHasNotReportedItsPromptIsNotFound) {
  const SequenceId id = Open(Request(100)).sequence_id();
  EXPECT_EQ(Open(Request(100)).prefix_tokens(), 0);
  Finish(id, 100);
  EXPECT_EQ(Open(Request(100)).prefix_tokens(), 32);
}

TEST_F(SequencePrefixTest, AnotherTenantsIsNeverFound) {
  Make(100, "mine");
  EXPECT_EQ(Open(Request(100, "theirs")).prefix_tokens(), 0);
  EXPECT_EQ(Open(Request(100)).prefix_tokens(), 0);
  EXPECT_EQ(Open(Request(100, "mine")).prefix_tokens(), 32);
}

TEST_F(SequencePrefixTest, AnotherFingerprintIsNeverFound) {
  Make(100);
  v1::OpenSequenceRequest other = Request(100);
  other.mutable_fingerprint()->set_positions("cache_relative");
  EXPECT_EQ(Open(other).prefix_tokens(), 0);
}

TEST_F(SequencePrefixTest, TheOwnersEndTakesNothingFromItsUsers) {
  const SequenceId owner = Make(100);
  const SequenceId user = Make(100);
  Close(owner);
  std::vector<std::byte> row(256);
  EXPECT_TRUE(store_.Read({user, 1, 1, 31, 1}, row).ok());
  EXPECT_EQ(Open(Request(100)).prefix_tokens(), 32) << "the user's prompt begins with them, too";
  Close(user);
  EXPECT_EQ(registry_.sequences().prefix_stats().indexed_pages, 0);
}

TEST_F(SequencePrefixTest, AReplayGetsTheFirstAnswer) {
  Make(100);
  const v1::OpenSequenceRequest request = Request(100);
  const v1::OpenSequenceResponse first = Open(request);
  const v1::OpenSequenceResponse again = Open(request);
  EXPECT_EQ(again.sequence_id(), first.sequence_id());
  EXPECT_EQ(again.prefix_tokens(), 32);
}

TEST_F(SequencePrefixTest, AGroupThatDoesNotMapTheSlabComputes) {
  Make(100);
  Epoch epoch = 0;
  v1::JoinRequest join = TestJoin(0, 1);
  join.set_group("far");
  registry_.groups().Join(
      registry_.groups().NewTicket(), join,
      [&](absl::StatusOr<v1::JoinResponse> joined) { epoch = joined->epoch(); });
  v1::OpenSequenceRequest request = Request(100);
  request.set_group("far");
  request.set_epoch(epoch);
  EXPECT_EQ(Open(request).prefix_tokens(), 0);
  ASSERT_TRUE(registry_.AttachDirect("far", 0, epoch).ok());
  request.set_request_id("another");
  EXPECT_EQ(Open(request).prefix_tokens(), 32) << "pages of another group's sequence";
}

TEST_F(SequencePrefixTest, ItIsFoundAfterARestart) {
  const SequenceId id = Make(100);
  // The records alone: the pages are still there.
  SequenceRegistry next(options_, store_, clock_, &state_);
  ASSERT_TRUE(next.Restore({id}).ok());
  EXPECT_EQ(next.prefix_stats().indexed_pages, 2);
  const auto opened = next.Open(Request(100), 1);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ(opened->prefix_tokens(), 32);
}

TEST_F(SequencePrefixTest, BadNumbersAreRefusedByName) {
  v1::OpenSequenceRequest request = Request(100);
  request.mutable_prefix()->set_max_tokens(41);
  EXPECT_THAT(std::string(registry_.Open(request).status().message()),
              HasSubstr("prefix.max_tokens is 41, want 0 to 40"));
  request = Request(100);
  request.set_max_tokens(kPrompt - 1);
  request.set_prompt_tokens(kPrompt - 1);
  EXPECT_THAT(std::string(registry_.Open(request).status().message()),
              HasSubstr("number of prefix.tokens is 40"));
}

}  // namespace
}  // namespace heavywater
