// Generations that go on where their stream broke off.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/server/test_cache_service.h"
#include "tests/worker/server/test_group.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

// The same request again, from token `received` on.
v1::GenerateRequest Resumed(v1::GenerateRequest request, const Generated& whole, size_t received) {
  v1::ResumePoint& resume = *request.mutable_resume();
  resume.set_sequence_id(whole.messages[0].sequence_id());
  resume.set_from_token(static_cast<int32_t>(received));
  const std::vector<int32_t> tokens = whole.tokens();
  resume.mutable_received_tokens()->Assign(tokens.begin(),
                                           tokens.begin() + static_cast<std::ptrdiff_t>(received));
  return request;
}

void ExpectTheRest(const Generated& rest, const Generated& whole, size_t received) {
  ASSERT_TRUE(rest.status.ok()) << rest.status;
  ASSERT_EQ(rest.messages.size(), whole.messages.size() - received);
  for (size_t i = 0; i < rest.messages.size(); ++i) {
    const v1::GenerateResponse& want = whole.messages[received + i];
    EXPECT_EQ(rest.messages[i].index(), want.index());
    EXPECT_EQ(rest.messages[i].token(), want.token());
    EXPECT_EQ(rest.messages[i].text(), want.text());
    EXPECT_EQ(rest.messages[i].logprob(), want.logprob());
    EXPECT_EQ(rest.messages[i].counts().tokens_resident(), want.counts().tokens_resident());
  }
  EXPECT_EQ(rest.summary.finish_reason(), whole.summary.finish_reason());
  EXPECT_EQ(rest.summary.new_tokens(), whole.summary.new_tokens());
}

class ResumeTest : public ::testing::Test {
 protected:
  ServerTestGroup::Configure WithCache(int snapshot_interval) {
    return [this, snapshot_interval](v1::WorkerConfig& config) {
      config.set_cache_address(service_.address());
      config.set_snapshot_interval_tokens(snapshot_interval);
      config.set_page_tokens(16);
    };
  }
  // All reports have arrived.
  static void Flush(ServerTestGroup& group, int size) {
    for (int rank = 0; rank < size; ++rank) group.worker(rank).Flush(absl::Seconds(10));
  }
  TestCacheService service_;
  TinyModel model_;
};

TEST_F(ResumeTest, WithoutACommittedStateTheTokensAreComputedAgain) {
  for (int size : {1, 3}) {
    ServerTestGroup group(model_, size);
    group.Start();
    v1::GenerateRequest request = Bounded(SomeTokens(30, 9), 20);
    request.mutable_sampling()->set_temperature(1.5);
    request.mutable_sampling()->set_seed(3);
    const Generated whole = group.Generate(request);
    for (size_t received : {0, 1, 7, 19, 20}) {
      ExpectTheRest(group.Generate(Resumed(request, whole, received)), whole, received);
    }
    EXPECT_THAT(group.Metrics(0), HasSubstr("heavywater_sequences_recomputed_total 5"));
  }
}

TEST_F(ResumeTest, FromACommittedStateTheRestIsTheSame) {
  for (const bool recall : {false, true}) {
    ServerTestGroup group(model_, 3, WithCache(8));
    group.Start();
    v1::GenerateRequest request = Bounded(SomeTokens(20, 9), 40);
    request.mutable_suffix_tokens()->Add(3);
    request.mutable_suffix_tokens()->Add(4);
    request.mutable_policy()->set_recall(recall);
    request.mutable_sampling()->set_temperature(1.5);
    const Generated whole = group.Generate(request);
    ASSERT_TRUE(whole.status.ok()) << whole.status;
    // The newest states first: going back to one forgets what came after it.
    for (size_t received : {40, 39, 33}) {
      Flush(group, 3);
      ExpectTheRest(group.Generate(Resumed(request, whole, received)), whole, received);
    }
    EXPECT_THAT(group.Metrics(0), HasSubstr("heavywater_sequences_restored_total 3"));
    EXPECT_THAT(group.Metrics(0), HasSubstr("heavywater_sequences_recomputed_total 0"));
  }
}

TEST_F(ResumeTest, AStateThatHasSeenTokensThatNobodyReceivedIsNotUsed) {
  ServerTestGroup group(model_, 1, WithCache(8));
  group.Start();
  const v1::GenerateRequest request = Bounded(SomeTokens(20, 9), 40);
  const Generated whole = group.Generate(request);
  Flush(group, 1);
  ExpectTheRest(group.Generate(Resumed(request, whole, 2)), whole, 2);
  EXPECT_THAT(group.Metrics(0), HasSubstr("heavywater_sequences_recomputed_total 1"));
}

TEST_F(ResumeTest, AnotherTextIsNotRestoredFrom) {
  ServerTestGroup group(model_, 1, WithCache(8));
  group.Start();
  const v1::GenerateRequest request = Bounded(SomeTokens(20, 9), 40);
  const Generated whole = group.Generate(request);
  Flush(group, 1);
  v1::GenerateRequest other = Resumed(request, whole, 40);
  other.set_tokens(5, other.tokens(5) + 1);
  EXPECT_TRUE(group.Generate(other).status.ok());
  EXPECT_THAT(group.Metrics(0), HasSubstr("heavywater_sequences_restored_total 0"));
}

TEST_F(ResumeTest, BadResumesNameTheField) {
  ServerTestGroup group(model_, 1);
  group.Start();
  v1::GenerateRequest request = MakeRequest({1, 2}, 3);
  request.mutable_resume()->set_from_token(1);
  EXPECT_THAT(std::string(group.Generate(request).status.message()),
              HasSubstr("resume.from_token is 1"));
  request.mutable_resume()->add_received_tokens(-1);
  EXPECT_THAT(std::string(group.Generate(request).status.message()),
              HasSubstr("resume.received_tokens[0] is -1"));
  for (int i = 0; i < 3; ++i) request.mutable_resume()->add_received_tokens(1);
  request.mutable_resume()->set_received_tokens(0, 1);
  request.mutable_resume()->set_from_token(4);
  EXPECT_THAT(std::string(group.Generate(request).status.message()), HasSubstr("max_new_tokens 3"));
}

}  // namespace
}  // namespace heavywater
