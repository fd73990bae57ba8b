#include "cache_service/runtime/access.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <set>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/runtime/method_roles.h"
#include "heavywater/v1/admin.pb.h"
#include "heavywater/v1/attention.pb.h"
#include "heavywater/v1/blob.pb.h"
#include "heavywater/v1/generation.pb.h"
#include "heavywater/v1/group.pb.h"
#include "heavywater/v1/page_store.pb.h"
#include "heavywater/v1/sequence.pb.h"
#include "tests/cache_service/security/test_certificates.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Every method of every service of the API, from the descriptors.
std::set<std::string> MethodsOfTheApi() {
  std::set<std::string> methods;
  for (const google::protobuf::Descriptor* any :
       {v1::StatsRequest::descriptor(), v1::StepRequest::descriptor(),
        v1::HasBlobsRequest::descriptor(), v1::GenerateRequest::descriptor(),
        v1::JoinRequest::descriptor(), v1::ReadRequest::descriptor(),
        v1::OpenSequenceRequest::descriptor()}) {
    const google::protobuf::FileDescriptor& file = *any->file();
    EXPECT_GT(file.service_count(), 0) << file.name();
    for (int i = 0; i < file.service_count(); ++i) {
      for (int j = 0; j < file.service(i)->method_count(); ++j) {
        methods.insert(absl::StrCat("/", file.service(i)->full_name(), "/",
                                    file.service(i)->method(j)->name()));
      }
    }
  }
  return methods;
}

TEST(MethodRolesTest, EveryMethodOfTheApiHasARole) {
  const std::set<std::string> methods = MethodsOfTheApi();
  EXPECT_GE(methods.size(), 34u);
  for (const std::string& method : methods) {
    const auto roles = RolesOf(method);
    ASSERT_TRUE(roles.has_value()) << method << " has no line in method_roles.cc";
    EXPECT_FALSE(roles->empty()) << method << " is open to everybody";
  }
}

TEST(MethodRolesTest, TheTableHasNothingThatTheApiHasNot) {
  const std::set<std::string> methods = MethodsOfTheApi();
  for (const std::string& method : MethodsWithRoles()) {
    if (method.rfind("/grpc.", 0) == 0) continue;
    EXPECT_TRUE(methods.contains(method)) << method;
  }
}

class AccessTest : public ::testing::Test {
 protected:
  AccessTest() {
    EXPECT_TRUE(InitLogging({.level = "error", .process = "test"}).ok());
    std::string text;
    for (const auto& [token, rest] :
         {std::pair("team-a-secret", "client team-a"), std::pair("worker-secret", "worker *"),
          std::pair("admin-secret", "admin *")}) {
      const TokenHash hash = HashToken(token);
      absl::StrAppend(&text,
                      absl::BytesToHexString(absl::string_view(
                          reinterpret_cast<const char*>(hash.data()), hash.size())),
                      " ", rest, "\n");
    }
    tokens_ = *Tokens::Create(folder_.Write("tokens", text), absl::Hours(1), [](auto&) {});
    access_ = std::make_unique<Access>(tokens_.get(), *metrics_);
  }

  void ExpectRefused(const std::string& method, const std::string& authorization,
                     absl::StatusCode code, const std::string& words, const char* reason) {
    const absl::Status status = access_->Authorize(method, authorization);
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(words));
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("secret")));
    EXPECT_THAT(
        prometheus::TextSerializer().Serialize(metrics_->Collect()),
        HasSubstr(absl::StrCat("heavywater_refused_calls_total{reason=\"", reason, "\"} 1")));
  }

  TestFolder folder_;
  std::shared_ptr<prometheus::Registry> metrics_ = std::make_shared<prometheus::Registry>();
  std::unique_ptr<Tokens> tokens_;
  std::unique_ptr<Access> access_;
};

constexpr char kStats[] = "/heavywater.v1.AdminService/Stats";
constexpr char kJoin[] = "/heavywater.v1.GroupService/Join";
constexpr char kGet[] = "/heavywater.v1.SequenceService/Get";

TEST_F(AccessTest, LetsEachRoleCallWhatIsItsOwn) {
  EXPECT_TRUE(access_->Authorize(kStats, "Bearer admin-secret").ok());
  EXPECT_TRUE(access_->Authorize(kJoin, "Bearer worker-secret").ok());
  for (const char* token : {"team-a-secret", "worker-secret", "admin-secret"}) {
    EXPECT_TRUE(access_->Authorize(kGet, absl::StrCat("Bearer ", token)).ok()) << token;
  }
}

TEST_F(AccessTest, SaysWhatIsWantedOfACallWithoutAToken) {
  ExpectRefused(kStats, "", absl::StatusCode::kUnauthenticated, "want one of role admin",
                "no_token");
}

TEST_F(AccessTest, RefusesATokenThatNobodyHasWithoutRepeatingIt) {
  ExpectRefused(kStats, "Bearer wrong-secret", absl::StatusCode::kUnauthenticated, "not known here",
                "unknown_token");
}

TEST_F(AccessTest, NamesTheRoleThatIsWanted) {
  ExpectRefused(kJoin, "Bearer team-a-secret", absl::StatusCode::kPermissionDenied,
                "role is client, want worker", "role");
}

TEST_F(AccessTest, RefusesAMethodWithoutARoleToEverybody) {
  ExpectRefused("/heavywater.v1.AdminService/Brand_new", "Bearer admin-secret",
                absl::StatusCode::kPermissionDenied, "no role may call", "undeclared_method");
}

TEST_F(AccessTest, LetsProbesAskForHealthWithoutAToken) {
  EXPECT_TRUE(access_->Authorize("/grpc.health.v1.Health/Check", "").ok());
}

TEST_F(AccessTest, WithoutTokensEverybodyMayCallEverything) {
  const Access open(nullptr, *metrics_);
  EXPECT_TRUE(open.Authorize(kStats, "").ok());
}

}  // namespace
}  // namespace heavywater
