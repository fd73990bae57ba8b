#include "cache_service/security/tokens.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "tests/cache_service/security/test_certificates.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

std::string HexOf(const std::string& token) {
  const TokenHash hash = HashToken(token);
  return absl::BytesToHexString(
      absl::string_view(reinterpret_cast<const char*>(hash.data()), hash.size()));
}

std::string Line(const std::string& token, const std::string& rest) {
  return absl::StrCat(HexOf(token), " ", rest, "\n");
}

TEST(TokensTest, TheHashIsSha256) {
  EXPECT_EQ(HexOf("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
}

TEST(TokensTest, ReadsTheTokenOfABearer) {
  EXPECT_EQ(BearerToken("Bearer abc"), "abc");
  EXPECT_EQ(BearerToken("bearer  abc "), "abc");
  EXPECT_EQ(BearerToken("Basic abc"), "");
  EXPECT_EQ(BearerToken("abc"), "");
  EXPECT_EQ(BearerToken(""), "");
}

TEST(TokensTest, ReadsRolesAndTenants) {
  const auto tokens = ParseTokens(absl::StrCat("# who may call\n\n", Line("a", "client team-a"),
                                               Line("b", "worker *"), Line("c", "admin  *"),
                                               Line("d", "client *")));
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ(tokens->at(HashToken("a")), (Caller{Role::kClient, "team-a"}));
  EXPECT_EQ(tokens->at(HashToken("b")), (Caller{Role::kWorker, ""}));
  EXPECT_EQ(tokens->at(HashToken("c")), (Caller{Role::kAdmin, ""}));
  EXPECT_EQ(tokens->at(HashToken("d")), (Caller{Role::kClient, ""}));
}

TEST(TokensTest, NamesTheLineThatIsWrongAndNothingOfIt) {
  const std::string good = Line("a", "client team-a");
  for (const std::string& bad :
       {std::string("secret-token client team-a\n"), Line("b", "client"), Line("b", "root *"),
        Line("b", "client a b"), Line("b", "admin team-a"), Line("b", "worker team-a"), good,
        Line("b", "client " + std::string(129, 'x'))}) {
    const auto tokens = ParseTokens(good + bad);
    ASSERT_EQ(tokens.status().code(), absl::StatusCode::kInvalidArgument) << bad;
    EXPECT_THAT(std::string(tokens.status().message()), HasSubstr("line 2"));
    EXPECT_THAT(std::string(tokens.status().message()), Not(HasSubstr("secret-token")));
    EXPECT_THAT(std::string(tokens.status().message()), Not(HasSubstr(HexOf("b"))));
  }
}

class TokensFileTest : public ::testing::Test {
 protected:
  void Start(const std::string& text) {
    auto tokens =
        Tokens::Create(folder_.Write("tokens", text), absl::Milliseconds(5),
                       [this](const absl::Status& result) { ++(result.ok() ? used_ : refused_); });
    ASSERT_TRUE(tokens.ok()) << tokens.status();
    tokens_ = *std::move(tokens);
  }
  static void WaitFor(const std::atomic<int>& count) {
    const absl::Time deadline = absl::Now() + absl::Seconds(10);
    while (count == 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
    EXPECT_EQ(count, 1);
  }

  TestFolder folder_;
  std::atomic<int> used_ = 0;
  std::atomic<int> refused_ = 0;
  std::unique_ptr<Tokens> tokens_;
};

TEST_F(TokensFileTest, KnowsTheTokensOfTheFileAndNoOthers) {
  Start(Line("a", "client team-a"));
  ASSERT_NE(tokens_->Find("a"), nullptr);
  EXPECT_EQ(tokens_->Find("a")->tenant, "team-a");
  EXPECT_EQ(tokens_->Find("b"), nullptr);
  EXPECT_EQ(tokens_->Find(""), nullptr);
  EXPECT_EQ(tokens_->Find(HexOf("a")), nullptr) << "the hash is no token";
}

TEST_F(TokensFileTest, UsesAChangedFile) {
  Start(Line("a", "client team-a"));
  folder_.Write("tokens", Line("b", "client team-b"));
  WaitFor(used_);
  EXPECT_EQ(tokens_->Find("a"), nullptr);
  EXPECT_NE(tokens_->Find("b"), nullptr);
}

TEST_F(TokensFileTest, KeepsWhatItHasWhenTheNewFileIsBrokenAndSaysSoOnce) {
  Start(Line("a", "client team-a"));
  folder_.Write("tokens", "broken\n");
  WaitFor(refused_);
  absl::SleepFor(absl::Milliseconds(50));
  EXPECT_EQ(refused_, 1);
  EXPECT_NE(tokens_->Find("a"), nullptr);
  folder_.Write("tokens", Line("b", "client team-b"));
  WaitFor(used_);
  EXPECT_NE(tokens_->Find("b"), nullptr);
}

TEST_F(TokensFileTest, AFileWithoutTokensShutsNobodyOut) {
  Start(Line("a", "client team-a"));
  folder_.Write("tokens", "# being written\n");
  WaitFor(refused_);
  EXPECT_NE(tokens_->Find("a"), nullptr);
  const auto none = Tokens::Create(folder_.Write("none", ""), absl::Seconds(1), [](auto&) {});
  EXPECT_EQ(none.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(none.status().message()), HasSubstr("no token"));
}

TEST_F(TokensFileTest, RefusesAFileThatIsNotThereNamingIt) {
  const auto tokens = Tokens::Create(folder_.path("none"), absl::Seconds(1), [](auto&) {});
  EXPECT_EQ(tokens.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(tokens.status().message()), HasSubstr(folder_.path("none")));
}

}  // namespace
}  // namespace heavywater
