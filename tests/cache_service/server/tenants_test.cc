// What tenants see of each other at a cache service with tokens: nothing.
#include <gmock/gmock.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/security/tokens.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/cache_service/security/test_certificates.h"
#include "tests/cache_service/server/cache_service_fixture.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;

std::string Line(const std::string& token, const std::string& rest) {
  const TokenHash hash = HashToken(token);
  return absl::StrCat(absl::BytesToHexString(absl::string_view(
                          reinterpret_cast<const char*>(hash.data()), hash.size())),
                      " ", rest, "\n");
}

// One with a token, as the service sees it.
class Caller {
 public:
  Caller(const std::string& address, const std::string& token)
      : channels_(*Channels::Create({.token = token})) {
    const auto channel = *channels_->Make(address, {});
    sequences_ = v1::SequenceService::NewStub(channel);
    pages_ = v1::PageStoreService::NewStub(channel);
  }

  absl::Status Get(SequenceId id) {
    v1::GetSequenceRequest request;
    request.set_sequence_id(id);
    grpc::ClientContext context;
    v1::Sequence response;
    return FromGrpcStatus(sequences_->Get(&context, request, &response));
  }
  absl::Status GetSets(SequenceId id) {
    v1::GetSetsRequest request;
    request.set_sequence_id(id);
    grpc::ClientContext context;
    v1::SequenceSet set;
    const auto reader = sequences_->GetSets(&context, request);
    while (reader->Read(&set)) {
    }
    return FromGrpcStatus(reader->Finish());
  }
  absl::Status Read(SequenceId id) {
    v1::ReadRequest request;
    request.set_sequence_id(id);
    request.set_num_positions(1);
    grpc::ClientContext context;
    v1::ReadResponse chunk;
    const auto reader = pages_->Read(&context, request);
    while (reader->Read(&chunk)) {
    }
    return FromGrpcStatus(reader->Finish());
  }
  absl::Status Close(SequenceId id, const std::string& request_id) {
    v1::CloseSequenceRequest request;
    request.set_sequence_id(id);
    request.set_request_id(request_id);
    grpc::ClientContext context;
    v1::CloseSequenceResponse response;
    return FromGrpcStatus(sequences_->Close(&context, request, &response));
  }
  // All pages of one sequence each.
  std::vector<SequenceId> List() {
    std::vector<SequenceId> ids;
    v1::ListSequencesRequest request;
    request.set_page_size(1);
    do {
      grpc::ClientContext context;
      v1::ListSequencesResponse response;
      const grpc::Status status = sequences_->List(&context, request, &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
      for (const v1::Sequence& sequence : response.sequences()) {
        ids.push_back(sequence.sequence_id());
      }
      request.set_page_token(response.next_page_token());
    } while (!request.page_token().empty());
    return ids;
  }

 private:
  std::unique_ptr<Channels> channels_;
  std::unique_ptr<v1::SequenceService::Stub> sequences_;
  std::unique_ptr<v1::PageStoreService::Stub> pages_;
};

class TenantsTest : public CacheServiceFixture {
 protected:
  void SetUp() override {
    config_.set_tokens_file(folder_.Write(
        "tokens", absl::StrCat(Line("a-token", "client team-a"), Line("b-token", "client team-b"),
                               Line("worker-token", "worker *"), Line("admin-token", "admin *"),
                               Line("gateway-token", "client *"))));
    security_.token = "worker-token";
    Restart();
    Form(1);
    of_a_ = OpenFor("team-a");
    of_b_ = OpenFor("team-b");
  }
  Caller As(const std::string& token) { return {server_->address(), token}; }

  // With a page that can be read.
  SequenceId OpenFor(const std::string& tenant) {
    v1::OpenSequenceRequest request = TestOpen(absl::StrCat("open-", tenant), epoch_);
    request.set_tenant(tenant);
    grpc::ClientContext context;
    v1::OpenSequenceResponse response;
    const grpc::Status status = sequences_->Open(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    const SequenceId id = response.sequence_id();
    EXPECT_TRUE(Reserve(id, 1).ok());
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) EXPECT_TRUE(Write({id, layer, head, 0, 1}).ok());
    }
    EXPECT_TRUE(Commit(id, 1).ok());
    return id;
  }

  TestFolder folder_;
  SequenceId of_a_ = 0;
  SequenceId of_b_ = 0;
};

TEST_F(TenantsTest, EachHasItsOwnSequences) {
  Caller a = As("a-token");
  EXPECT_EQ(a.Get(of_a_), absl::OkStatus());
  EXPECT_EQ(a.GetSets(of_a_), absl::OkStatus());
  EXPECT_EQ(a.Read(of_a_), absl::OkStatus());
  EXPECT_THAT(a.List(), ElementsAre(of_a_));
  EXPECT_THAT(As("b-token").List(), ElementsAre(of_b_));
}

// The words, too: nothing tells an id of another tenant from one that never was.
TEST_F(TenantsTest, AnothersIdIsAsUnknownAsOneThatNeverWas) {
  Caller b = As("b-token");
  const SequenceId never = of_b_ + 1000;
  const auto expect_alike = [&](auto call) {
    const absl::Status anothers = call(of_a_);
    const absl::Status nobodys = call(never);
    EXPECT_EQ(anothers.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(nobodys.code(), absl::StatusCode::kNotFound);
    EXPECT_EQ(absl::StrCat(anothers.message()),
              absl::StrCat("sequence ", of_a_, " is unknown or has ended"));
    EXPECT_EQ(absl::StrCat(nobodys.message()),
              absl::StrCat("sequence ", never, " is unknown or has ended"));
  };
  expect_alike([&](SequenceId id) { return b.Get(id); });
  expect_alike([&](SequenceId id) { return b.GetSets(id); });
  expect_alike([&](SequenceId id) { return b.Read(id); });
  expect_alike([&](SequenceId id) { return b.Close(id, "request"); });
  EXPECT_EQ(As("a-token").Get(of_a_), absl::OkStatus()) << "it is still there";
}

TEST_F(TenantsTest, ACloseIsReplayedToItsOwnTenantAlone) {
  Caller a = As("a-token");
  EXPECT_EQ(a.Close(of_a_, "request"), absl::OkStatus());
  EXPECT_EQ(a.Close(of_a_, "request"), absl::OkStatus()) << "a replay";
  EXPECT_EQ(As("b-token").Close(of_a_, "request").code(), absl::StatusCode::kNotFound);
}

TEST_F(TenantsTest, AdminsWorkersAndGatewaysSeeAll) {
  for (const char* token : {"admin-token", "worker-token", "gateway-token"}) {
    Caller caller = As(token);
    EXPECT_THAT(caller.List(), ElementsAre(of_a_, of_b_)) << token;
    EXPECT_EQ(caller.Get(of_a_), absl::OkStatus()) << token;
    EXPECT_EQ(caller.Read(of_b_), absl::OkStatus()) << token;
  }
}

TEST_F(TenantsTest, ATokenThatIsTakenAwayIsOfNoUse) {
  config_.set_security_reload_ms(100);
  Restart();
  Caller a = As("a-token");
  EXPECT_TRUE(a.List().empty());
  folder_.Write("tokens", Line("worker-token", "worker *"));
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  while (!absl::IsUnauthenticated(a.Get(1)) && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(20));
  }
  EXPECT_EQ(a.Get(1).code(), absl::StatusCode::kUnauthenticated);
}

// Calls inside the process do not come through the credentials: the services themselves
// still see that nobody is there.
TEST_F(TenantsTest, WhoComesWithoutATokenSeesNothingEvenPastTheDoor) {
  const auto sequences =
      v1::SequenceService::NewStub(server_->server().InProcessChannel(grpc::ChannelArguments()));
  v1::GetSequenceRequest request;
  request.set_sequence_id(of_a_);
  grpc::ClientContext context;
  v1::Sequence response;
  EXPECT_EQ(sequences->Get(&context, request, &response).error_code(), grpc::StatusCode::NOT_FOUND);
}

}  // namespace
}  // namespace heavywater
