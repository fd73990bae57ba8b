// Requests that ask which demoted positions were read in place.
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/server/test_cache_service.h"
#include "tests/worker/server/test_group.h"

namespace heavywater {
namespace {

using ::testing::IsEmpty;
using ::testing::Not;

constexpr int kPicks = 4;
constexpr int kQueries = kTinyLayers * kTinyKvHeads;  // of a token

v1::GenerateRequest Recalled(int prompt_tokens, int new_tokens,
                             const std::string& scope = "layer") {
  v1::GenerateRequest request = Bounded(SomeTokens(prompt_tokens, 3), new_tokens);
  v1::PolicyOptions& policy = *request.mutable_policy();
  policy.set_scope(scope);
  policy.set_recall(true);
  policy.set_recall_tokens(kPicks);
  policy.set_sketch_channels(8);
  request.set_return_reads(true);
  return request;
}

// Of one response, by position.
std::map<int32_t, int64_t> ReadsOf(const v1::GenerateResponse& response) {
  std::map<int32_t, int64_t> reads;
  for (const auto& one : response.reads()) reads[one.position()] = one.count();
  return reads;
}

int64_t TotalReads(const Generated& generated) {
  int64_t total = 0;
  for (const auto& message : generated.messages) {
    for (const auto& one : message.reads()) total += one.count();
  }
  return total;
}

class ReturnReadsTest : public ::testing::Test {
 protected:
  // Groups of different names, so that one need not be gone before the next.
  ServerTestGroup::Configure WithCache(const std::string& group = "one") {
    return [this, group](v1::WorkerConfig& config) {
      config.set_group(group);
      config.set_cache_address(service_.address());
      config.set_page_tokens(16);  // a block of a sketch
      config.set_reserve_ahead_tokens(16);
    };
  }

  TestCacheService service_;
  TinyModel model_;
};

// The summary counts what each query picked, apart from where.
TEST_F(ReturnReadsTest, ReadsAreSummedOverRanksAndAreAsManyAsTheQueriesPicked) {
  for (const char* scope : {"layer", "kv_head"}) {
    std::vector<std::vector<std::map<int32_t, int64_t>>> reads;
    for (int size : {1, 3}) {
      ServerTestGroup group(model_, size, WithCache(std::string(scope) + std::to_string(size)));
      group.Start();
      const Generated generated = group.Generate(Recalled(40, 12, scope));
      ASSERT_TRUE(generated.status.ok()) << generated.status;
      EXPECT_EQ(TotalReads(generated), generated.summary.recall().reads()) << scope << size;
      // The first token follows the prompt, which attends to all of itself.
      EXPECT_THAT(generated.messages[0].reads(), IsEmpty());
      auto& by_token = reads.emplace_back();
      for (size_t i = 1; i < generated.messages.size(); ++i) {
        by_token.push_back(ReadsOf(generated.messages[i]));
        EXPECT_THAT(by_token.back(), Not(IsEmpty())) << i;
        for (const auto& [position, count] : by_token.back()) {
          EXPECT_LT(position, 40 + static_cast<int>(i) - 6);  // not recent
          EXPECT_LE(count, kQueries);
        }
      }
    }
    EXPECT_EQ(reads[0], reads[1]) << scope;
  }
}

TEST_F(ReturnReadsTest, TheFirstResponseCoversTheWholeSuffix) {
  ServerTestGroup group(model_, 3, WithCache());
  group.Start();
  v1::GenerateRequest request = Recalled(30, 1);
  // In more than one step: a step of the group has room for 16 tokens at most.
  const std::vector<int32_t> suffix = SomeTokens(24, 5);
  request.mutable_suffix_tokens()->Assign(suffix.begin(), suffix.end());
  const Generated generated = group.Generate(request);
  ASSERT_TRUE(generated.status.ok()) << generated.status;
  EXPECT_GT(generated.summary.recall().reads(), kQueries * kPicks);
  EXPECT_EQ(TotalReads(generated), generated.summary.recall().reads());
}

TEST_F(ReturnReadsTest, RecallOfEverythingReadsAllThatIsDemoted) {
  for (const char* scope : {"layer", "kv_head"}) {
    ServerTestGroup group(model_, 1, WithCache(scope));
    group.Start();
    v1::GenerateRequest request = Recalled(40, 4, scope);
    request.mutable_policy()->clear_recall_tokens();
    request.mutable_policy()->set_recall_all(true);
    const Generated generated = group.Generate(request);
    ASSERT_TRUE(generated.status.ok()) << generated.status;
    // 12 of 40 positions are resident, whichever.
    EXPECT_EQ(TotalReads({.status = {}, .messages = {generated.messages[1]}, .summary = {}}),
              28 * kQueries);
    EXPECT_EQ(TotalReads(generated), generated.summary.recall().reads());
  }
}

TEST_F(ReturnReadsTest, NothingIsToldUnlessAsked) {
  ServerTestGroup group(model_, 1, WithCache());
  group.Start();
  v1::GenerateRequest request = Recalled(40, 6);
  request.set_return_reads(false);
  const Generated generated = group.Generate(request);
  ASSERT_TRUE(generated.status.ok()) << generated.status;
  EXPECT_GT(generated.summary.recall().reads(), 0);
  EXPECT_EQ(TotalReads(generated), 0);
}

// Reads of one sequence are not another's, though their steps are shared.
TEST_F(ReturnReadsTest, SequencesOfOneBatchReadAsEachAlone) {
  ServerTestGroup alone(model_, 1, WithCache());
  alone.Start();
  v1::GenerateRequest silent = Recalled(35, 12);
  silent.set_return_reads(false);
  const std::vector<v1::GenerateRequest> requests = {Recalled(40, 10), silent, Recalled(25, 10)};
  ServerTestGroup group(model_, 1, WithCache("together"));
  std::vector<std::shared_ptr<ServedGeneration>> together;
  for (const auto& request : requests) together.push_back(*group.engine().Start(request));
  group.Start();
  for (size_t i = 0; i < requests.size(); ++i) {
    const Generated want = alone.Generate(requests[i]);
    const Generated got = ServerTestGroup::ReadAll(*together[i]);
    ASSERT_TRUE(want.status.ok() && got.status.ok()) << want.status << got.status;
    ASSERT_EQ(got.messages.size(), want.messages.size());
    for (size_t token = 0; token < got.messages.size(); ++token) {
      EXPECT_EQ(ReadsOf(got.messages[token]), ReadsOf(want.messages[token])) << i << " " << token;
    }
  }
}

}  // namespace
}  // namespace heavywater
