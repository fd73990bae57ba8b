#include "cache_service/tier/remote_tier.h"

#include <gmock/gmock.h>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/redis_connection.h"
#include "cache_service/tier/stored_page.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/tier/lower_tier_conformance.h"
#include "tests/cache_service/tier/redis_server.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr size_t kPageBytes = 64 << 10;

std::unique_ptr<LowerTier> Open(const std::string& address, const std::string& store_id,
                                int64_t total_bytes, Clock& clock,
                                absl::Duration ttl = absl::Hours(1)) {
  auto tier = OpenRemoteTier({.address = address,
                              .store_id = store_id,
                              .total_bytes = total_bytes,
                              .timeout = absl::Milliseconds(500),
                              .ttl = ttl},
                             clock);
  EXPECT_TRUE(tier.ok()) << tier.status();
  return tier.ok() ? *std::move(tier) : nullptr;
}

// One server for all of these; each test has a store of its own in it.
std::unique_ptr<LowerTier> MakeInSharedServer(int64_t total_bytes, std::string* reason) {
  static std::string why;
  static const std::unique_ptr<RedisServer> server = RedisServer::Start(&why);
  static int count = 0;
  *reason = why;
  if (server == nullptr) return nullptr;
  return Open(server->address(), absl::StrCat("test-", ++count), total_bytes, Clock::Real());
}

INSTANTIATE_TEST_SUITE_P(Remote, LowerTierConformance,
                         ::testing::Values(LowerTierFactory{"Redis", MakeInSharedServer}),
                         [](const auto& info) { return info.param.name; });

class RemoteTierTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    server_ = RedisServer::Start(&reason);
    if (server_ == nullptr) GTEST_SKIP() << reason;
    tier_ = Open(server_->address(), "a", 64 << 20, clock_);
  }
  absl::Status Put(const PageKey& key) { return PutTestPage(*tier_, key, kPageBytes); }
  absl::StatusOr<std::vector<std::byte>> Get(const PageKey& key) {
    return GetPage(*tier_, key, kPageBytes);
  }
  // An integer that Redis answers.
  int64_t Ask(const std::vector<std::string_view>& command) {
    auto redis = RedisConnection::Connect("127.0.0.1", server_->port(), absl::Seconds(5));
    EXPECT_TRUE(redis.ok() && (*redis)->Send(command).ok());
    const auto reply = (*redis)->Receive();
    EXPECT_TRUE(reply.ok());
    return (*reply)->integer;
  }

  FakeClock clock_;
  std::unique_ptr<RedisServer> server_;
  std::unique_ptr<LowerTier> tier_;
};

TEST_F(RemoteTierTest, StoresThatShareARedisDoNotMeet) {
  const auto other = Open(server_->address(), "b", 64 << 20, clock_);
  ASSERT_TRUE(Put(TestKey(1, 0)).ok());
  EXPECT_EQ(GetPage(*other, TestKey(1, 0), kPageBytes).status().code(),
            absl::StatusCode::kNotFound);
  ASSERT_TRUE(PutTestPage(*other, TestKey(1, 0), kPageBytes).ok());
  ASSERT_TRUE(tier_->EraseSequence(1).ok());
  EXPECT_TRUE(GetPage(*other, TestKey(1, 0), kPageBytes).ok());
  EXPECT_EQ(Ask({"DBSIZE"}), 1);
}

TEST_F(RemoteTierTest, PagesExpireSoThatAKilledServiceLeavesNothingForEver) {
  tier_ = Open(server_->address(), "short", 64 << 20, clock_, absl::Milliseconds(300));
  ASSERT_TRUE(Put(TestKey(1, 0)).ok());
  EXPECT_TRUE(Get(TestKey(1, 0)).ok());
  absl::Status status;
  for (int i = 0; i < 50 && status.ok(); ++i) {
    absl::SleepFor(absl::Milliseconds(50));
    status = Get(TestKey(1, 0)).status();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
}

TEST_F(RemoteTierTest, MoreThanFitsIntoOneExchangeIsStoredInSeveral) {
  std::vector<std::vector<std::byte>> pages;
  std::vector<PageCopy> copies;
  for (int64_t page = 0; page < 200; ++page) {  // 12.5 MiB
    pages.push_back(TestPage(TestKey(1, page), kPageBytes));
    copies.push_back({TestKey(1, page), pages.back(), 0});
  }
  for (const absl::Status& status : tier_->Put(copies)) ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(Ask({"DBSIZE"}), 200);
  ASSERT_TRUE(tier_->EraseSequence(1).ok());
  EXPECT_EQ(Ask({"DBSIZE"}), 0);
}

TEST_F(RemoteTierTest, ChangedBytesAreDataLossForThatPageOnly) {
  ASSERT_TRUE(Put(TestKey(1, 0)).ok());
  ASSERT_TRUE(Put(TestKey(1, 1)).ok());
  const std::string name = absl::StrCat("heavywater:1:a:", StoredKey(TestKey(1, 0)));
  (void)Ask({"SETRANGE", name, "5000", "damage"});
  EXPECT_EQ(Get(TestKey(1, 0)).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(Get(TestKey(1, 1)).ok());
  (void)Ask({"SETRANGE", name, "70000", "longer"});
  EXPECT_EQ(Get(TestKey(1, 0)).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(RemoteTierTest, AServerWithoutMemoryRefusesPagesByName) {
  auto redis = RedisConnection::Connect("127.0.0.1", server_->port(), absl::Seconds(5));
  ASSERT_TRUE(redis.ok());
  ASSERT_TRUE((*redis)->Send({"CONFIG", "SET", "maxmemory", "1"}).ok());
  ASSERT_TRUE((*redis)->Receive().ok());
  const absl::Status full = Put(TestKey(1, 0));
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_EQ(tier_->Stats().used_bytes, 0);
}

TEST_F(RemoteTierTest, AServerThatIsGoneIsTriedAgainOnlyAfterAWhileAndComesBack) {
  ASSERT_TRUE(Put(TestKey(1, 0)).ok());
  const int port = server_->port();
  server_->Kill();
  const absl::Status gone = Get(TestKey(1, 0)).status();
  EXPECT_EQ(gone.code(), absl::StatusCode::kUnavailable);
  const absl::Status put = Put(TestKey(1, 1));
  EXPECT_EQ(put.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(put.message()), HasSubstr("tried again later"));
  EXPECT_EQ(tier_->EraseSequence(1).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(tier_->Stats().pages, 1) << "not known to be erased";
  std::string reason;
  server_ = nullptr;
  server_ = RedisServer::Start(&reason, port);
  ASSERT_NE(server_, nullptr) << reason;
  EXPECT_EQ(Get(TestKey(1, 0)).status().code(), absl::StatusCode::kUnavailable);
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(Get(TestKey(1, 0)).status().code(), absl::StatusCode::kNotFound)
      << "what it held went with it";
  EXPECT_TRUE(Put(TestKey(1, 1)).ok());
  EXPECT_TRUE(Get(TestKey(1, 1)).ok());
}

TEST_F(RemoteTierTest, AServerThatDoesNotAnswerCostsOneTimeOutThenNothing) {
  ASSERT_TRUE(Put(TestKey(1, 0)).ok());
  server_->Pause();
  const absl::Time start = absl::Now();
  EXPECT_EQ(Get(TestKey(1, 0)).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - start, absl::Seconds(5));
  const absl::Time again = absl::Now();
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(Get(TestKey(1, 0)).status().code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_LT(absl::Now() - again, absl::Milliseconds(400)) << "less than one time-out";
  server_->Continue();
  clock_.Advance(absl::Seconds(1));
  EXPECT_TRUE(Get(TestKey(1, 0)).ok());
}

TEST(RedisAddressTest, WhatIsNoAddressIsRefusedByName) {
  EXPECT_EQ(ParseRedisAddress("cache-1.example:6379")->host, "cache-1.example");
  EXPECT_EQ(ParseRedisAddress("cache-1.example:6379")->port, 6379);
  for (const char* address : {"", "host", ":1", "host:", "host:0", "host:65536", "host:1x"}) {
    const auto parsed = ParseRedisAddress(address);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << address;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr("want HOST:PORT"));
  }
}

}  // namespace
}  // namespace heavywater
