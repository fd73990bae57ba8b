// AttentionClient against a service that echoes, over a real channel in this process.
#include "client/cpp/attention_client.h"

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cache_service/base/crc32c.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr uint64_t kAttachment = 42;

// Returns queries as what attention returns; refuses layer 9; ends at layer 10.
class EchoAttention final : public v1::AttentionService::Service {
 public:
  grpc::Status Attach(grpc::ServerContext*, const v1::AttachEngineRequest* request,
                      v1::AttachEngineResponse* response) override {
    if (request->num_layers() != 2) {
      return {grpc::StatusCode::FAILED_PRECONDITION, "num_layers is 3, want 2"};
    }
    response->set_attachment_id(kAttachment);
    return grpc::Status::OK;
  }

  grpc::Status Step(grpc::ServerContext*,
                    grpc::ServerReaderWriter<v1::StepResponse, v1::StepRequest>* stream) override {
    v1::StepRequest request;
    while (stream->Read(&request)) {
      EXPECT_EQ(request.attachment_id(), kAttachment);
      if (request.attend().layer() == 10) return {grpc::StatusCode::UNAVAILABLE, "draining"};
      stream->Write(Answer(request));
    }
    ++streams_ended;
    return grpc::Status::OK;
  }

  grpc::Status Kept(grpc::ServerContext*, const v1::KeptRequest* request,
                    grpc::ServerWriter<v1::KeptResponse>* writer) override {
    v1::KeptResponse counts;
    counts.mutable_counts()->set_tokens_seen(static_cast<int64_t>(request->sequence_id()));
    writer->Write(counts);
    v1::KeptResponse set;
    set.mutable_set()->add_positions(3);
    writer->Write(set);
    return grpc::Status::OK;
  }

  grpc::Status ReadKv(grpc::ServerContext*, const v1::ReadKvRequest* request,
                      grpc::ServerWriter<v1::ReadKvResponse>* writer) override {
    for (const std::string rows : {"first", "second"}) {
      v1::ReadKvResponse response;
      response.set_rows(rows);
      const uint32_t sum = Crc32c(std::as_bytes(std::span(rows)));
      response.set_crc32c(request->layer() == 1 ? sum + 1 : sum);
      writer->Write(response);
    }
    return grpc::Status::OK;
  }

  std::atomic<int> streams_ended = 0;

 private:
  static v1::StepResponse Answer(const v1::StepRequest& request) {
    v1::StepResponse response;
    if (request.has_open()) response.mutable_opened()->set_sequence_id(7);
    if (request.has_begin()) response.mutable_begun()->set_step(1);
    if (request.has_end()) response.mutable_ended()->add_items()->set_code(8);
    if (request.has_close()) response.mutable_closed();
    if (!request.has_attend()) return response;
    if (request.attend().layer() == 9) {
      response.mutable_error()->set_code(static_cast<int>(absl::StatusCode::kInvalidArgument));
      response.mutable_error()->set_message("keys[0] is nan");
    } else {
      response.mutable_attended()->set_out(request.attend().queries());
    }
    return response;
  }
};

class AttentionClientTest : public ::testing::Test {
 protected:
  AttentionClientTest() {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
  }
  ~AttentionClientTest() override { server_->Shutdown(); }

  absl::StatusOr<std::unique_ptr<AttentionClient>> Attach(int num_layers = 2) {
    v1::AttachEngineRequest shape;
    shape.set_num_layers(num_layers);
    return AttentionClient::Attach(
        v1::AttentionService::NewStub(server_->InProcessChannel(grpc::ChannelArguments())), shape,
        std::chrono::seconds(10));
  }

  EchoAttention service_;
  std::unique_ptr<grpc::Server> server_;
};

TEST_F(AttentionClientTest, AStepIsOneConversationThatEndsWithTheClient) {
  {
    const auto client = *Attach();
    EXPECT_EQ(client->Open({})->sequence_id(), 7u);
    EXPECT_EQ(client->Begin({})->step(), 1u);
    const std::vector<float> q = {1, 2, 3};
    EXPECT_THAT(*client->Attend(0, q, q, q), ElementsAre(1, 2, 3));
    EXPECT_EQ(client->End()->items(0).code(), 8);
    EXPECT_TRUE(client->Close(7).ok());
  }
  EXPECT_EQ(service_.streams_ended, 1);
}

TEST_F(AttentionClientTest, WhatIsRefusedIsAnErrorAndTheStreamGoesOn) {
  EXPECT_THAT(std::string(Attach(3).status().message()), HasSubstr("num_layers is 3"));
  const auto client = *Attach();
  const std::vector<float> q = {1};
  const absl::Status refused = client->Attend(9, q, q, q).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("keys[0]"));
  EXPECT_TRUE(client->Attend(0, q, q, q).ok());
}

TEST_F(AttentionClientTest, AStreamThatHasEndedSaysSoAgainAndAgain) {
  const auto client = *Attach();
  const std::vector<float> q = {1};
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(client->Attend(10, q, q, q).status().code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(client->End().status().message(), "draining");
}

TEST_F(AttentionClientTest, ReadsAreWholeAndChecked) {
  const auto client = *Attach();
  const auto kept = client->Kept(5);
  ASSERT_EQ(kept->size(), 2u);
  EXPECT_EQ((*kept)[0].counts().tokens_seen(), 5);
  v1::ReadKvRequest request;
  EXPECT_EQ(*client->ReadKv(request), "firstsecond");
  request.set_layer(1);
  EXPECT_EQ(client->ReadKv(request).status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace heavywater
