#include "cache_service/security/pem.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/time/clock.h"
#include "tests/cache_service/security/test_certificates.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

class PemTest : public ::testing::Test {
 protected:
  void ExpectRefused(const PemMaterial& material, const std::string& words) {
    const auto checked = CheckPem(material, absl::Now());
    ASSERT_EQ(checked.status().code(), absl::StatusCode::kInvalidArgument) << words;
    EXPECT_THAT(std::string(checked.status().message()), HasSubstr(words));
    EXPECT_THAT(std::string(checked.status().message()), Not(HasSubstr("PRIVATE")));
  }

  TestAuthority authority_;
  TestIdentity identity_ = authority_.Sign("server");
};

TEST_F(PemTest, TakesACertificateWithItsKeyAndSaysHowLongItIsGood) {
  const auto end =
      CheckPem({identity_.certificate, identity_.key, authority_.certificate()}, absl::Now());
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_GT(*end, absl::Now() + absl::Minutes(50));
  EXPECT_LT(*end, absl::Now() + absl::Minutes(70));
}

TEST_F(PemTest, TakesRootsAlone) {
  const auto end = CheckPem({.roots = authority_.certificate()}, absl::Now());
  ASSERT_TRUE(end.ok()) << end.status();
  EXPECT_EQ(*end, absl::InfiniteFuture());
}

TEST_F(PemTest, RefusesWhatIsNoCertificate) {
  ExpectRefused({"garbage", identity_.key, ""}, "has no certificate");
  ExpectRefused({"", identity_.key, ""}, "has no certificate");
  ExpectRefused({identity_.certificate, identity_.key, "garbage"}, "trusted certificates");
}

TEST_F(PemTest, RefusesAChainThatBreaksOff) {
  const std::string half = authority_.certificate().substr(0, authority_.certificate().size() / 2);
  ExpectRefused({identity_.certificate + half, identity_.key, ""}, "broken certificate");
}

TEST_F(PemTest, RefusesTheKeyOfAnotherCertificate) {
  ExpectRefused({identity_.certificate, authority_.Sign("other").key, ""}, "not that of");
}

TEST_F(PemTest, RefusesWhatIsNoKey) {
  ExpectRefused({identity_.certificate, "garbage", ""}, "no private key");
  ExpectRefused({identity_.certificate, "", ""}, "no private key");
}

TEST_F(PemTest, RefusesAnExpiredCertificate) {
  const TestIdentity old = authority_.Sign("server", -absl::Hours(1));
  ExpectRefused({old.certificate, old.key, ""}, "was valid until");
}

}  // namespace
}  // namespace heavywater
