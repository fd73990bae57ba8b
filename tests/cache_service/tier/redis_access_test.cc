// The remote tier at a Redis with a password, users and TLS: a real one.
#include <gmock/gmock.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/tier/remote_tier.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/security/test_certificates.h"
#include "tests/cache_service/tier/lower_tier_conformance.h"
#include "tests/cache_service/tier/redis_server.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr size_t kPageBytes = 64 << 10;
constexpr char kPassword[] = "correct-horse";

// One server for all tests of this file: TLS with client certificates, a password for the
// default user, and the user "tier" with another.
struct Server {
  Server() {
    const TestIdentity identity = authority.Sign("redis.test");
    const TestIdentity own = authority.Sign("cache");
    ca = folder.Write("ca.pem", authority.certificate());
    cert = folder.Write("own.pem", own.certificate);
    key = folder.Write("own.key", own.key);
    password = folder.Write("password", absl::StrCat(kPassword, "\n"));
    redis = RedisServer::Start(
        &reason,
        {"--tls-cert-file", folder.Write("redis.pem", identity.certificate), "--tls-key-file",
         folder.Write("redis.key", identity.key), "--tls-ca-cert-file", ca, "--requirepass",
         kPassword, "--user", "tier", "on", ">second", "~heavywater:*", "+@all"},
        {.password_file = password, .tls = Tls()});
  }
  RedisTlsOptions Tls() const { return {.ca_file = ca, .cert_file = cert, .key_file = key}; }

  TestAuthority authority;
  TestFolder folder;
  std::string ca, cert, key, password, reason;
  std::unique_ptr<RedisServer> redis;
};

Server& Shared() {
  static Server server;
  return server;
}

RemoteTierOptions Options() {
  static int count = 0;
  return {.address = Shared().redis->address(),
          .store_id = absl::StrCat("access-", ++count),
          .total_bytes = 64 << 20,
          .timeout = absl::Seconds(2),
          .password_file = Shared().password,
          .tls = Shared().Tls()};
}

INSTANTIATE_TEST_SUITE_P(Remote, LowerTierConformance,
                         ::testing::Values(LowerTierFactory{
                             "RedisOverTls",
                             [](int64_t total_bytes,
                                std::string* reason) -> std::unique_ptr<LowerTier> {
                               *reason = Shared().reason;
                               if (Shared().redis == nullptr) return nullptr;
                               RemoteTierOptions options = Options();
                               options.total_bytes = total_bytes;
                               auto tier = OpenRemoteTier(options, Clock::Real());
                               EXPECT_TRUE(tier.ok()) << tier.status();
                               return *std::move(tier);
                             }}),
                         [](const auto& info) { return info.param.name; });

class RedisAccessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (Shared().redis == nullptr) GTEST_SKIP() << Shared().reason;
    options_ = Options();
  }
  // Of the first page that is stored with options_.
  absl::Status Try() {
    auto tier = OpenRemoteTier(options_, clock_);
    if (!tier.ok()) return tier.status();
    const absl::Status put = PutTestPage(**tier, TestKey(1, 0), kPageBytes);
    if (!put.ok()) return put;
    return GetPage(**tier, TestKey(1, 0), kPageBytes).status();
  }

  FakeClock clock_;
  TestFolder folder_;
  RemoteTierOptions options_;
};

TEST_F(RedisAccessTest, PagesGoThroughTlsWithAPasswordOrAsAUser) {
  EXPECT_TRUE(Try().ok()) << Try();
  options_.username = "tier";
  options_.password_file = folder_.Write("second", "second");
  EXPECT_TRUE(Try().ok()) << Try();
  options_.tls.server_name = "redis.test";
  EXPECT_TRUE(Try().ok()) << Try();
}

TEST_F(RedisAccessTest, MoreThanABufferGoesBothWays) {
  auto tier = OpenRemoteTier(options_, clock_);
  ASSERT_TRUE(tier.ok());
  std::vector<std::vector<std::byte>> pages;
  std::vector<PageCopy> copies;
  for (int64_t page = 0; page < 100; ++page) {  // 6.25 MiB
    pages.push_back(TestPage(TestKey(1, page), kPageBytes));
    copies.push_back({TestKey(1, page), pages.back(), Crc32c(pages.back())});
  }
  for (const absl::Status& status : (*tier)->Put(copies)) ASSERT_TRUE(status.ok()) << status;
  for (int64_t page = 0; page < 100; ++page) {
    const auto got = GetPage(**tier, TestKey(1, page), kPageBytes);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(*got, pages[page]);
  }
  ASSERT_TRUE((*tier)->EraseSequence(1).ok());
}

TEST_F(RedisAccessTest, AWrongPasswordIsUnavailableNamesTheUserAndShowsNoPassword) {
  options_.password_file = folder_.Write("wrong", "wrong-horse");
  const absl::Status status = Try();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("\"default\""), HasSubstr("WRONGPASS"), Not(HasSubstr("horse"))));
  options_.username = "nobody";
  EXPECT_THAT(std::string(Try().message()), HasSubstr("\"nobody\""));
}

TEST_F(RedisAccessTest, APasswordThatIsCorrectedInItsFileIsUsedAtTheNextTry) {
  options_.password_file = folder_.Write("changing", "wrong");
  auto tier = OpenRemoteTier(options_, clock_);
  ASSERT_TRUE(tier.ok());
  EXPECT_FALSE(PutTestPage(**tier, TestKey(1, 0), kPageBytes).ok());
  folder_.Write("changing", kPassword);
  clock_.Advance(absl::Seconds(20));
  EXPECT_TRUE(PutTestPage(**tier, TestKey(1, 0), kPageBytes).ok());
}

TEST_F(RedisAccessTest, AServerThatSomebodyElseHasSignedOrThatHasAnotherNameIsRefused) {
  const TestAuthority other("somebody else");
  options_.tls.ca_file = folder_.Write("other.pem", other.certificate());
  EXPECT_THAT(std::string(Try().message()), HasSubstr("certificate is no good"));
  options_.tls.ca_file = Shared().ca;
  options_.tls.server_name = "another.test";
  EXPECT_THAT(std::string(Try().message()), HasSubstr("certificate is no good"));
}

TEST_F(RedisAccessTest, PlaintextAndNoCertificateAreRefusedWithinTheTimeOut) {
  options_.tls = {};
  EXPECT_EQ(Try().code(), absl::StatusCode::kUnavailable);
  options_.tls = {.ca_file = Shared().ca};
  EXPECT_EQ(Try().code(), absl::StatusCode::kUnavailable);
  options_ = Options();
  options_.password_file.clear();
  EXPECT_THAT(std::string(Try().message()),
              HasSubstr("uthenticat"));  // Redis has words for both sizes
}

TEST_F(RedisAccessTest, FilesThatCannotBeUsedAreRefusedAtTheStartByName) {
  const auto refused = [this] {
    return std::string(OpenRemoteTier(options_, clock_).status().message());
  };
  options_.password_file = "/nowhere/password";
  EXPECT_THAT(refused(), HasSubstr("redis_password_file /nowhere/password"));
  options_.password_file = folder_.Write("empty", "\n");
  EXPECT_THAT(refused(), HasSubstr("redis_password_file"));
  options_ = Options();
  options_.tls.ca_file = folder_.Write("no.pem", "no certificate");
  EXPECT_THAT(refused(), HasSubstr("redis_ca_file"));
  options_ = Options();
  options_.tls.key_file.clear();
  EXPECT_THAT(refused(), HasSubstr("both or neither"));
  options_ = Options();
  options_.tls.ca_file.clear();
  EXPECT_THAT(refused(), HasSubstr("redis_ca_file is empty"));
  options_ = Options();
  options_.username = "tier";
  options_.password_file.clear();
  EXPECT_THAT(refused(), HasSubstr("redis_username"));
}

}  // namespace
}  // namespace heavywater
