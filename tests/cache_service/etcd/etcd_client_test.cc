// The client over a real etcd.
#include "cache_service/etcd/etcd_client.h"

#include <gtest/gtest.h>

#include <thread>

#include "absl/time/clock.h"
#include "tests/cache_service/etcd/etcd_server.h"
#include "tests/cache_service/security/test_certificates.h"

namespace heavywater {
namespace {

class EtcdClientTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    server_ = EtcdServer::Start(&reason);
    if (server_ == nullptr) GTEST_SKIP() << reason;
    client_ = Make({.endpoints = {server_->address()}});
    WaitUntilItAnswers(*client_);
  }

  // It listens a moment before it serves.
  static void WaitUntilItAnswers(EtcdClient& client) {
    absl::Status status;
    for (int tries = 0; tries < 200; ++tries) {
      status = client.Get("a").status();
      if (!absl::IsUnavailable(status)) return;
      absl::SleepFor(absl::Milliseconds(100));
    }
    FAIL() << status;
  }

  static std::unique_ptr<EtcdClient> Make(const EtcdOptions& options) {
    auto client = EtcdClient::Create(options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

  int64_t Put(const std::string& key, const std::string& value, int64_t lease = 0) {
    const auto revision = client_->Commit({}, {{key, value, lease}});
    EXPECT_TRUE(revision.ok() && revision->has_value()) << revision.status();
    return revision.ok() ? revision->value_or(0) : 0;
  }

  std::string Value(const std::string& key) {
    const auto entry = client_->Get(key);
    if (!entry.ok()) return std::string(entry.status().message());
    return entry->has_value() ? (*entry)->value : "(none)";
  }

  std::unique_ptr<EtcdServer> server_;
  std::unique_ptr<EtcdClient> client_;
};

TEST_F(EtcdClientTest, WritesAreReadBackWithTheirRevision) {
  EXPECT_EQ(Value("a"), "(none)");
  const int64_t revision = Put("a", "1");
  const auto entry = client_->Get("a");
  ASSERT_TRUE(entry.ok() && entry->has_value());
  EXPECT_EQ((*entry)->value, "1");
  EXPECT_EQ((*entry)->revision, revision);
  ASSERT_TRUE(client_->Commit({}, {{"a", std::nullopt}}).ok());
  EXPECT_EQ(Value("a"), "(none)");
}

TEST_F(EtcdClientTest, AListingHasAllKeysOfThePrefixAlsoOverManyPages) {
  for (int i = 0; i < 1203; i += 100) {
    std::vector<EtcdWrite> writes;
    for (int j = i; j < std::min(i + 100, 1203); ++j) {
      writes.push_back({"p/" + std::to_string(10000 + j), std::to_string(j)});
    }
    ASSERT_TRUE(client_->Commit({}, writes).ok());
  }
  Put("q", "outside");
  const auto listing = client_->List("p/");
  ASSERT_TRUE(listing.ok()) << listing.status();
  ASSERT_EQ(listing->entries.size(), 1203u);
  for (int i = 0; i < 1203; ++i) EXPECT_EQ(listing->entries[i].value, std::to_string(i));
}

TEST_F(EtcdClientTest, ATransactionWritesOnlyWhereNothingHasChangedAndOneOfTwoWins) {
  const auto first = client_->Commit({{"k", 0}}, {{"k", "first"}});
  ASSERT_TRUE(first.ok() && first->has_value());
  const auto absent = client_->Commit({{"k", 0}}, {{"k", "second"}});
  ASSERT_TRUE(absent.ok());
  EXPECT_FALSE(absent->has_value());
  EXPECT_EQ(Value("k"), "first");

  std::array<bool, 2> won = {};
  std::vector<std::thread> racers;
  for (int i = 0; i < 2; ++i) {
    racers.emplace_back([&, i] {
      const auto mine = client_->Commit({{"k", **first}}, {{"k", std::to_string(i)}});
      won[i] = mine.ok() && mine->has_value();
    });
  }
  for (std::thread& racer : racers) racer.join();
  EXPECT_NE(won[0], won[1]);
  EXPECT_EQ(Value("k"), won[0] ? "0" : "1");
}

TEST_F(EtcdClientTest, AKeyLivesAsLongAsItsLeaseIsRenewed) {
  const auto lease = client_->Grant(absl::Seconds(2));
  ASSERT_TRUE(lease.ok()) << lease.status();
  Put("held", "x", *lease);
  for (int i = 0; i < 4; ++i) {
    absl::SleepFor(absl::Seconds(1));
    ASSERT_TRUE(client_->Renew(*lease).ok());
  }
  EXPECT_EQ(Value("held"), "x");
  absl::SleepFor(absl::Seconds(4));
  EXPECT_EQ(Value("held"), "(none)");
  EXPECT_EQ(client_->Renew(*lease).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(client_->Commit({}, {{"held", "y", *lease}}).status().code(),
            absl::StatusCode::kNotFound);
}

TEST_F(EtcdClientTest, ARevokedLeaseTakesItsKeysAlongAtOnce) {
  const auto lease = client_->Grant(absl::Seconds(60));
  ASSERT_TRUE(lease.ok());
  Put("held", "x", *lease);
  EXPECT_TRUE(client_->Revoke(*lease).ok());
  EXPECT_EQ(Value("held"), "(none)");
  EXPECT_TRUE(client_->Revoke(*lease).ok());
}

TEST_F(EtcdClientTest, AWatchTellsOfEveryChangeFromItsRevisionOn) {
  const int64_t before = Put("w/a", "1");
  auto watch = client_->Watch("w/", before + 1);
  ASSERT_TRUE(watch.ok()) << watch.status();
  Put("w/b", "2");
  Put("other", "3");
  ASSERT_TRUE(client_->Commit({}, {{"w/a", std::nullopt}}).ok());
  std::vector<EtcdEvent> events;
  while (events.size() < 2) {
    const auto next = (*watch)->Next();
    ASSERT_TRUE(next.ok()) << next.status();
    events.insert(events.end(), next->begin(), next->end());
  }
  EXPECT_FALSE(events[0].deleted);
  EXPECT_EQ(events[0].entry.key, "w/b");
  EXPECT_EQ(events[0].entry.value, "2");
  EXPECT_TRUE(events[1].deleted);
  EXPECT_EQ(events[1].entry.key, "w/a");

  std::thread waiter(
      [&] { EXPECT_EQ((*watch)->Next().status().code(), absl::StatusCode::kCancelled); });
  absl::SleepFor(absl::Milliseconds(50));
  (*watch)->Cancel();
  waiter.join();
}

TEST_F(EtcdClientTest, AnEtcdThatIsAwayIsUnavailableAndWhatItHadIsThereAfterwards) {
  Put("kept", "x");
  server_->Kill();
  EXPECT_EQ(client_->Get("kept").status().code(), absl::StatusCode::kUnavailable);
  std::string reason;
  ASSERT_TRUE(server_->StartAgain(&reason)) << reason;
  WaitUntilItAnswers(*client_);
  EXPECT_EQ(Value("kept"), "x");
}

TEST_F(EtcdClientTest, AnEtcdThatStandsStillIsUnavailableAfterTheTimeOut) {
  auto client = Make({.endpoints = {server_->address()}, .timeout = absl::Milliseconds(300)});
  ASSERT_TRUE(client->Get("a").ok());
  server_->Pause();
  const absl::Time began = absl::Now();
  EXPECT_EQ(client->Get("a").status().code(), absl::StatusCode::kUnavailable);
  EXPECT_LT(absl::Now() - began, absl::Seconds(3));
  server_->Continue();
  EXPECT_TRUE(client_->Get("a").ok());
}

TEST_F(EtcdClientTest, AnotherMemberIsAskedWhereOneIsAway) {
  auto client = Make({.endpoints = {"127.0.0.1:1", server_->address()}});
  const auto written = client->Commit({}, {{"a", "1"}});
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_EQ(Value("a"), "1");
}

absl::Status SetUpUser(const std::string& address) {
  const auto channel = grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  const auto auth = etcdserverpb::Auth::NewStub(channel);
  const auto status = [](const grpc::Status& answer) {
    return absl::Status(static_cast<absl::StatusCode>(answer.error_code()), answer.error_message());
  };
  etcdserverpb::AuthRoleAddRequest role;
  role.set_name("root");
  etcdserverpb::AuthUserAddRequest user;
  user.set_name("root");
  user.set_password("secret");
  etcdserverpb::AuthUserGrantRoleRequest grant;
  grant.set_user("root");
  grant.set_role("root");
  grpc::ClientContext contexts[4];
  etcdserverpb::AuthRoleAddResponse role_added;
  etcdserverpb::AuthUserAddResponse user_added;
  etcdserverpb::AuthUserGrantRoleResponse granted;
  etcdserverpb::AuthEnableResponse enabled;
  absl::Status all = status(auth->RoleAdd(&contexts[0], role, &role_added));
  if (absl::IsFailedPrecondition(all)) all = absl::OkStatus();  // etcd has made it
  all.Update(status(auth->UserAdd(&contexts[1], user, &user_added)));
  all.Update(status(auth->UserGrantRole(&contexts[2], grant, &granted)));
  all.Update(status(auth->AuthEnable(&contexts[3], {}, &enabled)));
  return all;
}

TEST_F(EtcdClientTest, ItSaysWhoItIsWhereEtcdAsks) {
  const absl::Status users = SetUpUser(server_->address());
  ASSERT_TRUE(users.ok()) << users;
  EXPECT_FALSE(client_->Get("a").ok());
  const TestFolder folder;
  EtcdOptions options = {.endpoints = {server_->address()},
                         .user = "root",
                         .password_file = folder.Write("password", "secret\n")};
  auto client = Make(options);
  const auto written = client->Commit({}, {{"a", "1"}});
  ASSERT_TRUE(written.ok()) << written.status();
  // Its tokens are forgotten with the process; the client asks for another.
  server_->Kill();
  std::string reason;
  ASSERT_TRUE(server_->StartAgain(&reason)) << reason;
  WaitUntilItAnswers(*client);
  const absl::StatusOr<std::optional<EtcdEntry>> entry = client->Get("a");
  ASSERT_TRUE(entry.ok()) << entry.status();
  EXPECT_EQ((*entry)->value, "1");
  options.password_file = folder.Write("wrong", "guess\n");
  EXPECT_FALSE(Make(options)->Get("a").ok());
}

TEST(EtcdTlsTest, ItChecksTheServersCertificate) {
  TestAuthority authority;
  TestAuthority other("another");
  const TestFolder folder;
  const TestIdentity identity = authority.Sign("etcd");
  std::string reason;
  const auto server =
      EtcdServer::Start(&reason, {"--cert-file=" + folder.Write("cert.pem", identity.certificate),
                                  "--key-file=" + folder.Write("key.pem", identity.key)});
  if (server == nullptr) GTEST_SKIP() << reason;
  const auto get = [&](const std::string& ca) {
    auto client = EtcdClient::Create(
        {.endpoints = {server->address()}, .security = {.ca_file = folder.Write("ca.pem", ca)}});
    return client.ok() ? (*client)->Get("a").status() : client.status();
  };
  EXPECT_TRUE(get(authority.certificate()).ok()) << get(authority.certificate());
  EXPECT_EQ(get(other.certificate()).code(), absl::StatusCode::kUnavailable);
}

TEST(EtcdOptionsTest, WhatCannotWorkIsRefusedByName) {
  const auto error = [](const EtcdOptions& options) {
    const auto client = EtcdClient::Create(options);
    EXPECT_EQ(client.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(client.status().message());
  };
  EXPECT_NE(error({}).find("etcd_endpoints has 0"), std::string::npos);
  EXPECT_NE(error({.endpoints = {"http://a:1"}}).find("http://a:1"), std::string::npos);
  EXPECT_NE(error({.endpoints = {"a:1"}, .user = "u"}).find("etcd_user"), std::string::npos);
  EXPECT_NE(error({.endpoints = {"a:1"}, .user = "u", .password_file = "f"}).find("plaintext"),
            std::string::npos);
  EXPECT_TRUE(
      EtcdClient::Create(
          {.endpoints = {"a:1"}, .user = "u", .password_file = "f", .allow_plaintext = true})
          .ok());
}

TEST(EtcdOptionsTest, TheEndOfAPrefixComesAfterAllOfItsKeys) {
  EXPECT_EQ(EndOfPrefix("a/"), "a0");
  EXPECT_EQ(EndOfPrefix("a\xff"), "b");
  EXPECT_EQ(EndOfPrefix("\xff"), std::string(1, '\0'));
}

}  // namespace
}  // namespace heavywater
