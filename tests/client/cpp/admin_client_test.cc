#include "client/cpp/admin_client.h"

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <set>
#include <vector>

namespace heavywater {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// Keeps the ids of what it was asked for; fails its first `failures` reads with UNAVAILABLE.
class FakeAdmin final : public v1::AdminService::Service {
 public:
  grpc::Status Stats(grpc::ServerContext*, const v1::StatsRequest*,
                     v1::StatsResponse* response) override {
    if (failures-- > 0) return {grpc::StatusCode::UNAVAILABLE, "starting"};
    response->set_sequences(3);
    return grpc::Status::OK;
  }
  grpc::Status GetConfig(grpc::ServerContext*, const v1::GetConfigRequest*,
                         v1::GetConfigResponse* response) override {
    response->set_yaml("host_bytes: 1000\n");
    return grpc::Status::OK;
  }
  grpc::Status SetQuota(grpc::ServerContext*, const v1::SetQuotaRequest* request,
                        v1::SetQuotaResponse* response) override {
    request_ids.push_back(request->request_id());
    response->mutable_tenant()->set_tenant(request->tenant());
    return grpc::Status::OK;
  }
  grpc::Status Pin(grpc::ServerContext*, const v1::PinRequest* request,
                   v1::PinResponse* response) override {
    request_ids.push_back(request->request_id());
    if (request->sequence_id() == 404) return {grpc::StatusCode::NOT_FOUND, "unknown"};
    response->set_pins(request->unpin() ? 0 : request->ttl_ms());
    return grpc::Status::OK;
  }
  grpc::Status Drain(grpc::ServerContext*, const v1::DrainRequest* request,
                     v1::DrainResponse* response) override {
    request_ids.push_back(request->request_id());
    undone = request->undo();
    if (!undone) response->mutable_drain()->set_deadline_in_ms(request->deadline_ms());
    return grpc::Status::OK;
  }
  grpc::Status Flush(grpc::ServerContext*, const v1::FlushRequest* request,
                     v1::FlushResponse* response) override {
    request_ids.push_back(request->request_id());
    response->set_moved_bytes(static_cast<int64_t>(request->sequence_id()));
    return grpc::Status::OK;
  }
  grpc::Status Snapshot(grpc::ServerContext*, const v1::SnapshotRequest* request,
                        v1::SnapshotResponse* response) override {
    request_ids.push_back(request->request_id());
    response->set_sequences(5);
    return grpc::Status::OK;
  }
  grpc::Status Watch(grpc::ServerContext* context, const v1::WatchRequest* request,
                     grpc::ServerWriter<v1::WatchResponse>* writer) override {
    v1::WatchResponse message;
    for (int64_t number = request->after_event() + 1; number <= last_event; ++number) {
      message.clear_events();
      message.add_events()->set_number(number);
      if (!writer->Write(message) || context->IsCancelled()) return grpc::Status::CANCELLED;
    }
    return {grpc::StatusCode::UNAVAILABLE, "the service ends"};
  }

  int failures = 0;
  bool undone = false;
  int64_t last_event = 3;
  std::vector<std::string> request_ids;
};

class AdminClientTest : public ::testing::Test {
 protected:
  AdminClientTest() {
    grpc::ServerBuilder builder;
    builder.RegisterService(&admin_);
    server_ = builder.BuildAndStart();
    client_ = std::make_unique<AdminClient>(
        v1::AdminService::NewStub(server_->InProcessChannel({})), milliseconds(5000),
        [this](milliseconds backoff) { slept_.push_back(backoff); });
  }

  FakeAdmin admin_;
  std::unique_ptr<grpc::Server> server_;
  std::vector<milliseconds> slept_;
  std::unique_ptr<AdminClient> client_;
};

TEST_F(AdminClientTest, ReadsAreRepeatedWhileTheServiceIsAway) {
  admin_.failures = 2;
  const auto stats = client_->Stats();
  ASSERT_TRUE(stats.ok()) << stats.status();
  EXPECT_EQ(stats->sequences(), 3);
  EXPECT_THAT(slept_, ElementsAre(milliseconds(100), milliseconds(400)));
  EXPECT_EQ(*client_->GetConfig(), "host_bytes: 1000\n");
}

TEST_F(AdminClientTest, EveryMutationHasARequestIdOfItsOwn) {
  v1::SetQuotaRequest quota;
  quota.set_tenant("acme");
  EXPECT_EQ(client_->SetQuota(quota)->tenant(), "acme");
  EXPECT_EQ(client_->Pin(7, "me", 2)->pins(), 2);
  EXPECT_EQ(client_->Unpin(7, "me")->pins(), 0);
  EXPECT_EQ(client_->Drain(2000, true)->deadline_in_ms(), 2000);
  EXPECT_TRUE(client_->UndoDrain().ok());
  EXPECT_TRUE(admin_.undone);
  EXPECT_EQ(client_->Flush(9)->moved_bytes(), 9);
  EXPECT_EQ(client_->Snapshot()->sequences(), 5);
  EXPECT_EQ(admin_.request_ids.size(), 7u);
  EXPECT_EQ(std::set<std::string>(admin_.request_ids.begin(), admin_.request_ids.end()).size(), 7u);
  quota.set_request_id("mine");
  ASSERT_TRUE(client_->SetQuota(quota).ok());
  EXPECT_EQ(admin_.request_ids.back(), "mine");
}

TEST_F(AdminClientTest, ARefusalComesAsItIs) {
  EXPECT_EQ(client_->Pin(404, "me", 2).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(AdminClientTest, WatchHandsOverEachMessageUntilTheCallerHasSeenEnough) {
  std::vector<int64_t> seen;
  const auto note = [&seen](const v1::WatchResponse& message) {
    seen.push_back(message.events(0).number());
    return message.events(0).number() < 3;
  };
  v1::WatchRequest request;
  request.set_after_event(1);
  admin_.last_event = 1'000'000;
  EXPECT_TRUE(client_->Watch(request, note).ok());
  EXPECT_THAT(seen, ElementsAre(2, 3));
  admin_.last_event = 2;
  EXPECT_EQ(client_->Watch(request, note).code(), absl::StatusCode::kUnavailable);
}

TEST_F(AdminClientTest, WithoutAnAddressItSaysWhatIsMissing) {
  const auto client = AdminClient::Connect("");
  ASSERT_FALSE(client.ok());
  EXPECT_THAT(client.status().message(), HasSubstr("cache_address"));
}

}  // namespace
}  // namespace heavywater
