// Tokens that are appended after the prompt has been compressed.
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/server/test_group.h"

namespace heavywater {
namespace {

using ::testing::SizeIs;

// `text`, of which what follows the first `prompt` tokens is appended after the
// prompt has been compressed.
v1::GenerateRequest Appended(const std::vector<int32_t>& text, int prompt, int new_tokens,
                             const std::string& policy = "snapkv_h2o") {
  v1::GenerateRequest request = Bounded({text.begin(), text.begin() + prompt}, new_tokens, policy);
  request.mutable_suffix_tokens()->Assign(text.begin() + prompt, text.end());
  return request;
}

class SuffixTest : public ::testing::Test {
 protected:
  TinyModel model_;
};

TEST_F(SuffixTest, ASuffixOfAFullCacheContinuesAsOneLongPromptDoes) {
  const std::vector<int32_t> text = SomeTokens(40, 9);
  for (int size : {1, 3}) {
    ServerTestGroup group(model_, size);
    group.Start();
    const Generated whole = group.Generate(Bounded(text, 10, "full"));
    ASSERT_TRUE(whole.status.ok()) << whole.status;
    for (int prompt : {1, 19, 39}) {
      const Generated generated = group.Generate(Appended(text, prompt, 10, "full"));
      ASSERT_TRUE(generated.status.ok()) << generated.status;
      EXPECT_EQ(generated.tokens(), whole.tokens()) << size << " " << prompt;
      for (size_t i = 0; i < 10; ++i) {
        EXPECT_EQ(generated.messages[i].index(), i);
        EXPECT_NEAR(generated.messages[i].logprob(), whole.messages[i].logprob(), 1e-4);
      }
      EXPECT_EQ(generated.summary.prompt_tokens(), prompt);
      EXPECT_EQ(generated.summary.suffix_tokens(), 40 - prompt);
      EXPECT_GT(generated.summary.suffix_seconds(), 0);
      EXPECT_EQ(generated.summary.new_tokens(), 10);
      EXPECT_EQ(generated.summary.counts().tokens_seen(), 49);
    }
  }
}

TEST_F(SuffixTest, ASuffixComesAfterThePromptIsCompressed) {
  ServerTestGroup group(model_, 1);
  group.Start();
  const std::vector<int32_t> text = SomeTokens(40, 9);
  const Generated appended = group.Generate(Appended(text, 30, 6));
  ASSERT_TRUE(appended.status.ok()) << appended.status;
  EXPECT_EQ(appended.summary.counts().tokens_seen(), 45);
  EXPECT_EQ(appended.summary.counts().tokens_resident(), 12);
  // It has not seen all of the prompt, so that it reads otherwise.
  const Generated whole = group.Generate(Bounded(text, 6, "full"));
  EXPECT_NE(appended.messages[0].logprob(), whole.messages[0].logprob());
}

TEST_F(SuffixTest, ASuffixTakesNoMoreSlotsThanAnIntervalThatIsLongEnough) {
  ServerTestGroup group(model_, 1);
  group.Start();
  for (int interval : {16, 24}) {
    v1::GenerateRequest plain = Bounded(SomeTokens(20, 9), 30);
    v1::GenerateRequest appended = Appended(SomeTokens(43, 9), 20, 7);
    for (v1::GenerateRequest* request : {&plain, &appended}) {
      request->mutable_policy()->set_plan_interval_steps(interval);
    }
    const Generated without = group.Generate(plain);
    const Generated with = group.Generate(appended);
    ASSERT_TRUE(without.status.ok() && with.status.ok()) << without.status << with.status;
    EXPECT_EQ(with.summary.device_bytes_peak(), without.summary.device_bytes_peak()) << interval;
  }
}

TEST_F(SuffixTest, SuffixesShareAStepWithSequencesThatDecode) {
  // As many sequences as a step has rows, so that suffixes wait for room in turn.
  std::vector<v1::GenerateRequest> requests;
  for (int i = 0; i < 8; ++i) {
    requests.push_back(i % 2 == 0 ? Appended(SomeTokens(40 - i, i), 9, 12)
                                  : Bounded(SomeTokens(10 + i, i), 14));
  }
  std::vector<std::vector<int32_t>> alone;
  for (const auto& request : requests) {
    ServerTestGroup group(model_, 1);
    group.Start();
    alone.push_back(group.Generate(request).tokens());
  }
  ServerTestGroup group(model_, 1);
  std::vector<std::shared_ptr<ServedGeneration>> together;
  for (const auto& request : requests) together.push_back(*group.engine().Start(request));
  group.Start();
  for (size_t i = 0; i < requests.size(); ++i) {
    const Generated generated = ServerTestGroup::ReadAll(*together[i]);
    ASSERT_TRUE(generated.status.ok()) << generated.status;
    EXPECT_EQ(generated.summary.suffix_tokens(), requests[i].suffix_tokens_size());
    EXPECT_THAT(generated.tokens(), SizeIs(alone[i].size()));
    // A suffix in other pieces is compressed at other plans; the rest is equal.
    if (i % 2 == 1) {
      EXPECT_EQ(generated.tokens(), alone[i]) << i;
    }
  }
}

TEST_F(SuffixTest, ASequenceThatIsCancelledWithinItsSuffixFreesItsMemory) {
  ServerTestGroup group(model_, 1, [](v1::WorkerConfig& config) { config.set_max_stall_ms(0); });
  const auto generation = group.engine().Start(Appended(SomeTokens(60, 1), 2, 4));
  ASSERT_TRUE(generation.ok()) << generation.status();
  for (int round = 0; round < 4; ++round) ASSERT_TRUE(group.scheduler().RunOnce().ok());
  EXPECT_EQ(group.worker(0).runner().cache().num_sequences(), 1);
  EXPECT_FALSE((*generation)->responses.Pop(absl::ZeroDuration()).has_value());
  (*generation)->responses.Cancel();
  ASSERT_TRUE(group.scheduler().RunOnce().ok());
  EXPECT_EQ(group.worker(0).runner().cache().num_sequences(), 0);
}

}  // namespace
}  // namespace heavywater
