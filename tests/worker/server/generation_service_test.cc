// GenerationService over a real channel.
#include "worker/server/generation_service.h"

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "cache_service/runtime/server_runtime.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/server/test_group.h"
#include "worker/server/model_info.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

class GenerationServiceTest : public ::testing::Test {
 protected:
  GenerationServiceTest()
      : group_(model_, 1),
        service_(
            MakeModelMessages(MakeModelInfo(group_.facts().config, group_.facts().tokenizer->spec(),
                                            group_.facts().fingerprint, 1, "recall"),
                              group_.facts().tokenizer->spec())) {
    auto runtime = ServerRuntime::Start({.listen_address = "127.0.0.1:0", .metrics_address = ""},
                                        {&service_}, std::make_shared<prometheus::Registry>());
    EXPECT_TRUE(runtime.ok()) << runtime.status();
    runtime_ = *std::move(runtime);
    stub_ = v1::GenerationService::NewStub(
        grpc::CreateChannel(runtime_->address(), grpc::InsecureChannelCredentials()));
  }

  void Serve() {
    service_.Serve(group_.engine());
    group_.Start();
  }

  Generated Generate(const v1::GenerateRequest& request) {
    grpc::ClientContext context;
    const auto reader = stub_->Generate(&context, request);
    Generated generated;
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
      if (response.has_summary()) {
        generated.summary = response.summary();
      } else if (response.has_index()) {
        generated.messages.push_back(response);
      } else {
        ++accepted_;
        EXPECT_NE(response.sequence_id(), 0u);
      }
    }
    const grpc::Status status = reader->Finish();
    generated.status =
        absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
    return generated;
  }

  TinyModel model_;
  ServerTestGroup group_;
  GenerationService service_;
  int accepted_ = 0;  // first messages
  std::unique_ptr<ServerRuntime> runtime_;
  std::unique_ptr<v1::GenerationService::Stub> stub_;
};

TEST_F(GenerationServiceTest, IsUnavailableUntilTheGroupHasFormed) {
  EXPECT_EQ(Generate(MakeRequest({1, 2}, 2)).status.code(), absl::StatusCode::kUnavailable);
  Serve();
  EXPECT_TRUE(Generate(MakeRequest({1, 2}, 2)).status.ok());
}

TEST_F(GenerationServiceTest, BadInputIsNamedAndTheServerStaysUp) {
  Serve();
  v1::GenerateRequest bad = MakeRequest({1, 2, 1000}, 2);
  const Generated refused = Generate(bad);
  EXPECT_EQ(refused.status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status.message()), HasSubstr("tokens[2] is 1000"));
  v1::GenerateRequest large;
  large.set_text(std::string(5 << 20, 'x'));
  large.set_max_new_tokens(1);
  EXPECT_EQ(Generate(large).status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(Generate(MakeRequest({1, 2}, 2)).status.ok());
}

TEST_F(GenerationServiceTest, TextComesBackAsText) {
  Serve();
  v1::GenerateRequest request;
  request.set_text("abc");
  for (int32_t token : {72, 0xc3, 0xa9, 33, 0xff}) request.add_forced_tokens(token);
  const Generated generated = Generate(request);
  ASSERT_TRUE(generated.status.ok()) << generated.status;
  EXPECT_EQ(generated.messages[1].text(), "");  // half a character
  EXPECT_EQ(generated.messages[2].text(), "\u00e9");
  EXPECT_EQ(generated.text(), "H\u00e9!\ufffd");
  EXPECT_EQ(generated.summary.finish_reason(), "forced");
}

TEST_F(GenerationServiceTest, ACancelledCallFreesItsSequence) {
  Serve();
  RankCache& cache = group_.worker(0).runner().cache();
  const int64_t before = cache.memory().reserved_bytes();
  for (int round = 0; round < 20; ++round) {
    grpc::ClientContext context;
    const auto reader = stub_->Generate(&context, MakeRequest(SomeTokens(20, round), 40));
    v1::GenerateResponse response;
    if (round % 2 == 0) reader->Read(&response);
    context.TryCancel();
    while (reader->Read(&response)) {
    }
    reader->Finish();
  }
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  while (group_.scheduler().num_running() > 0 && absl::Now() < deadline) {
    absl::SleepFor(absl::Milliseconds(10));
  }
  EXPECT_TRUE(Generate(MakeRequest({1, 2}, 2)).status.ok());
  runtime_->Drain();
  group_.Stop();
  EXPECT_EQ(cache.num_sequences(), 0);
  EXPECT_EQ(cache.memory().reserved_bytes(), before);
}

TEST_F(GenerationServiceTest, ARequestIdThatRunsIsRefusedAndFreeAgainAfterwards) {
  service_.Serve(group_.engine());
  v1::GenerateRequest request = MakeRequest({1, 2}, 4);
  request.set_request_id("mine");
  // Queued: nothing runs yet, so the first call stays.
  grpc::ClientContext context;
  const auto first = stub_->Generate(&context, request);
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  while (group_.num_queued() == 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
  EXPECT_EQ(Generate(request).status.code(), absl::StatusCode::kAlreadyExists);
  group_.Start();
  v1::GenerateResponse response;
  while (first->Read(&response)) {
  }
  EXPECT_TRUE(first->Finish().ok());
  EXPECT_TRUE(Generate(request).status.ok());
}

TEST_F(GenerationServiceTest, GetModelGivesEverythingForATokenizer) {
  grpc::ClientContext context;
  const auto reader = stub_->GetModel(&context, v1::GetModelRequest());
  std::vector<v1::GetModelResponse> messages;
  v1::GetModelResponse message;
  while (reader->Read(&message)) messages.push_back(message);
  ASSERT_TRUE(reader->Finish().ok());
  ASSERT_FALSE(messages.empty());
  const v1::ModelInfo& info = messages.front().model();
  EXPECT_EQ(info.vocab_size(), kTinyVocab);
  EXPECT_EQ(info.context_tokens(), kTinyContext);
  EXPECT_EQ(info.num_kv_heads(), kTinyKvHeads);
  EXPECT_EQ(info.eos_token(), kTinyEnd);
  EXPECT_EQ(info.chat_template(), "{{ messages }}");
  EXPECT_EQ(info.fingerprint().dtype(), "fp32");
  EXPECT_EQ(info.default_policy(), "recall");
  std::vector<std::string> pieces;
  std::vector<std::string> merges;
  for (const auto& one : messages) {
    for (const v1::Piece& piece : one.pieces()) pieces.push_back(piece.text());
    for (const std::string& merge : one.merges()) merges.push_back(merge);
  }
  EXPECT_EQ(pieces, group_.facts().tokenizer->spec().tokens);
  EXPECT_EQ(merges, group_.facts().tokenizer->spec().merges);
}

TEST(ModelInfoTest, ALargeVocabularyIsCutIntoMessages) {
  TokenizerSpec spec;
  spec.tokens.assign(200'000, "abcdefghij");
  spec.token_types.assign(200'000, TokenType::kNormal);
  spec.merges.assign(1000, "a b");
  const auto messages = MakeModelMessages(v1::ModelInfo(), spec);
  int pieces = 0;
  int merges = 0;
  for (const auto& message : messages) {
    EXPECT_LT(message.ByteSizeLong(), size_t{2} << 20);
    pieces += message.pieces_size();
    merges += message.merges_size();
  }
  EXPECT_GT(messages.size(), 4u);
  EXPECT_EQ(pieces, 200'000);
  EXPECT_EQ(merges, 1000);
}

}  // namespace
}  // namespace heavywater
