// Positions::kCacheRelative through the whole worker: generation past the context.
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/server/test_cache_service.h"
#include "tests/worker/server/test_group.h"

namespace heavywater {
namespace {

using ::testing::SizeIs;

constexpr int kNewTokens = 4 * kTinyContext;

v1::GenerateRequest PastTheContext() {
  v1::GenerateRequest request = Bounded(SomeTokens(30, 3), kNewTokens, "streaming");
  request.mutable_policy()->set_positions("cache_relative");
  request.set_ignore_eos(true);
  return request;
}

TEST(PastContextTest, ABoundedCacheAtItsOwnPlacesGeneratesForAsLongAsItIsAskedTo) {
  const TinyModel model;
  for (const int size : {1, 3}) {
    TestCacheService service;
    ServerTestGroup group(model, size, [&](v1::WorkerConfig& config) {
      config.set_cache_address(service.address());
    });
    group.Start();
    const Generated generated = group.Generate(PastTheContext());
    ASSERT_TRUE(generated.status.ok()) << generated.status;
    EXPECT_THAT(generated.tokens(), SizeIs(kNewTokens));
    EXPECT_EQ(generated.summary.counts().tokens_seen(), 30 + kNewTokens - 1);
    EXPECT_EQ(generated.summary.counts().tokens_resident(), 12);
    EXPECT_EQ(generated.summary.budget().positions(), "cache_relative");

    v1::GenerateRequest absolute = PastTheContext();
    absolute.mutable_policy()->set_positions("absolute");
    EXPECT_EQ(group.Generate(absolute).status.code(), absl::StatusCode::kOutOfRange);
  }
}

TEST(PastContextTest, WhatHasLeftTheCacheLeavesNoTrace) {
  const TinyModel model;
  ServerTestGroup group(model, 1);
  group.Start();
  // Whatever came before the window, the window decides.
  const auto answer = [&](int prompt_tokens, int seed, const char* positions) {
    v1::GenerateRequest request = MakeRequest(SomeTokens(prompt_tokens, seed), 40);
    request.mutable_policy()->set_policy("streaming");
    request.mutable_policy()->set_positions(positions);
    request.mutable_policy()->set_heavy_tokens(1);
    request.mutable_policy()->set_recent_tokens(7);
    request.mutable_policy()->set_sink_tokens(0);
    for (const int32_t token : SomeTokens(40, 5)) request.add_forced_tokens(token);
    request.clear_max_new_tokens();
    request.set_return_logits(true);
    const Generated generated = group.Generate(request);
    EXPECT_TRUE(generated.status.ok()) << generated.status;
    return generated.messages.back().logits();
  };
  EXPECT_NE(answer(10, 1, "cache_relative"), "");
  // Two layers of 8 slots each reach 16 tokens back, and no farther. Where in the text
  // that is does not matter: at its places in the cache it is the same, bit for bit.
  EXPECT_EQ(answer(10, 1, "cache_relative"), answer(17, 2, "cache_relative"));
  EXPECT_NE(answer(10, 1, "absolute"), answer(17, 2, "absolute"));
}

}  // namespace
}  // namespace heavywater
