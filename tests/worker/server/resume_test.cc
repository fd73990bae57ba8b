// Generations that go on where their stream broke off.
#include <atomic>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
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

int32_t OtherToken(int32_t token) { return (token + 1) % 256; }

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
  // The last ones have; the first, of the prompt's end, has not.
  ExpectTheRest(group.Generate(Resumed(request, whole, 2)), whole, 2);
  EXPECT_THAT(group.Metrics(0), HasSubstr("heavywater_sequences_restored_total 1"));
  ExpectTheRest(group.Generate(Resumed(request, whole, 0)), whole, 0);
  // What it held is free.
  EXPECT_TRUE(absl::IsNotFound(service_.Get(whole.messages[0].sequence_id()).status()));
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

TEST_F(ResumeTest, ARequestThatOnlyNamesTheIdOfARunningOneLeavesItAlone) {
  ServerTestGroup group(model_, 1, WithCache(8));
  const v1::GenerateRequest request = Bounded(SomeTokens(20, 9), 40);
  const auto running = group.engine().Start(request);
  ASSERT_TRUE(running.ok()) << running.status();
  for (int i = 0; i < 20; ++i) ASSERT_TRUE(group.scheduler().RunOnce().ok());
  Generated told;
  while (told.messages.size() < 3) {
    auto response = (*running)->responses.Pop(absl::ZeroDuration());
    ASSERT_TRUE(response.has_value());
    told.messages.push_back(*std::move(response));
  }
  const v1::GenerateRequest same = Resumed(request, told, 3);
  std::vector<v1::GenerateRequest> others(4, same);
  others[0].set_tokens(5, OtherToken(same.tokens(5)));
  others[1].set_tenant("somebody else");
  others[2].mutable_policy()->set_recent_tokens(5);
  others[3].mutable_resume()->set_received_tokens(1, OtherToken(same.resume().received_tokens(1)));
  for (const v1::GenerateRequest& other : others) {
    const auto started = group.engine().Start(other);
    ASSERT_TRUE(started.ok()) << started.status();
    EXPECT_NE((*started)->sequence, (*running)->sequence);
    EXPECT_FALSE((*running)->responses.cancelled());
    (*started)->responses.Cancel();
  }
  // Its own client ends it.
  std::thread step([&] {
    while (!(*running)->responses.cancelled()) absl::SleepFor(absl::Milliseconds(1));
    EXPECT_TRUE(group.scheduler().RunOnce().ok());
    ServerTestGroup::ReadAll(**running);
    group.engine().End(**running, true);
  });
  EXPECT_TRUE(group.engine().Start(same).ok());
  step.join();
  EXPECT_TRUE(absl::IsAborted((*running)->responses.status()));
  EXPECT_THAT(std::string((*running)->responses.status().message()), HasSubstr("was taken over"));
}

TEST_F(ResumeTest, OfTwoThatResumeTheSameSequenceOneGetsIt) {
  ServerTestGroup group(model_, 1, WithCache(8));
  group.Start();
  const v1::GenerateRequest request = Bounded(SomeTokens(20, 9), 40);
  const Generated whole = group.Generate(request);
  Flush(group, 1);
  const v1::GenerateRequest resumed = Resumed(request, whole, 40);
  std::atomic<int> num_started = 0;
  std::vector<std::thread> clients;
  for (int i = 0; i < 2; ++i) {
    clients.emplace_back([&] {
      const auto started = group.engine().Start(resumed);
      if (started.ok()) ++num_started;
      EXPECT_TRUE(started.ok() || absl::IsUnavailable(started.status())) << started.status();
    });
  }
  for (std::thread& client : clients) client.join();
  EXPECT_EQ(num_started, 1);
}

TEST_F(ResumeTest, AFullQueueTellsOneThatGoesOnToComeAgain) {
  ServerTestGroup group(model_, 1, [](v1::WorkerConfig& config) { config.set_max_queued(1); });
  const v1::GenerateRequest request = Bounded(SomeTokens(20, 9), 4);
  ASSERT_TRUE(group.engine().Start(request).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(group.engine().Start(request).status()));
  v1::GenerateRequest resumed = request;
  resumed.mutable_resume()->set_sequence_id(1);
  EXPECT_TRUE(absl::IsUnavailable(group.engine().Start(resumed).status()));
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
