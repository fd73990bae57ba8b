// For whom a generation runs, where callers have tokens.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <prometheus/registry.h>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "cache_service/runtime/server_runtime.h"
#include "cache_service/runtime/server_security.h"
#include "cache_service/security/tokens.h"
#include "gtest/gtest.h"
#include "tests/cache_service/security/test_certificates.h"
#include "tests/worker/server/test_cache_service.h"
#include "tests/worker/server/test_group.h"
#include "worker/server/generation_service.h"
#include "worker/server/model_info.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

std::string Line(const std::string& token, const std::string& rest) {
  const TokenHash hash = HashToken(token);
  return absl::StrCat(absl::BytesToHexString(absl::string_view(
                          reinterpret_cast<const char*>(hash.data()), hash.size())),
                      " ", rest, "\n");
}

class GenerationTenantsTest : public ::testing::Test {
 protected:
  GenerationTenantsTest()
      : group_(model_, 1,
               [this](v1::WorkerConfig& config) {
                 config.set_cache_address(cache_.address());
                 config.set_page_tokens(16);
                 config.set_snapshot_interval_tokens(8);
               }),
        metrics_(std::make_shared<prometheus::Registry>()) {
    const std::string tokens = folder_.Write(
        "tokens",
        absl::StrCat(Line("a-token", "client team-a"), Line("b-token", "client team-b"),
                     Line("gateway-token", "client *"), Line("worker-token", "worker *")));
    security_ =
        *ServerSecurity::Create({.listen_address = "127.0.0.1:0", .tokens_file = tokens}, metrics_);
    const TokenizerSpec& tokenizer = group_.facts().tokenizer->spec();
    service_ = std::make_unique<GenerationService>(
        MakeModelMessages(MakeModelInfo(group_.facts().config, tokenizer,
                                        group_.facts().fingerprint, 1, "snapkv_h2o"),
                          tokenizer),
        [] { return "not ready"; }, &security_->access());
    runtime_ = *ServerRuntime::Start({.listen_address = "127.0.0.1:0", .security = security_.get()},
                                     {service_.get()}, metrics_);
    service_->Serve(group_.engine());
    group_.Start();
  }

  // The status, and the sequence that it was told.
  std::pair<grpc::Status, SequenceId> Generate(const std::string& token,
                                               const v1::GenerateRequest& request) {
    const auto channels = *Channels::Create({.token = token});
    const auto stub = v1::GenerationService::NewStub(*channels->Make(runtime_->address(), {}));
    grpc::ClientContext context;
    const auto reader = stub->Generate(&context, request);
    SequenceId sequence = 0;
    received_.clear();
    v1::GenerateResponse response;
    while (reader->Read(&response)) {
      if (response.sequence_id() != 0) sequence = response.sequence_id();
      if (response.has_index()) received_.push_back(response.token());
    }
    return {reader->Finish(), sequence};
  }
  std::string TenantOf(SequenceId sequence) {
    const auto found = cache_.Get(sequence);
    return found.ok() ? found->tenant() : found.status().ToString();
  }

  TestFolder folder_;
  TestCacheService cache_;
  TinyModel model_;
  ServerTestGroup group_;
  std::shared_ptr<prometheus::Registry> metrics_;
  std::unique_ptr<ServerSecurity> security_;
  std::unique_ptr<GenerationService> service_;
  std::unique_ptr<ServerRuntime> runtime_;
  std::vector<int32_t> received_;
};

TEST_F(GenerationTenantsTest, ATokensTenantIsTheSequences) {
  v1::GenerateRequest request = Bounded(SomeTokens(20, 9), 4);
  const auto [status, sequence] = Generate("a-token", request);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(TenantOf(sequence), "team-a");
  request.set_tenant("team-a");
  EXPECT_TRUE(Generate("a-token", request).first.ok());
}

TEST_F(GenerationTenantsTest, NobodyActsForAnotherTenant) {
  v1::GenerateRequest request = Bounded(SomeTokens(20, 9), 4);
  request.set_tenant("team-b");
  const grpc::Status status = Generate("a-token", request).first;
  EXPECT_EQ(status.error_code(), grpc::StatusCode::PERMISSION_DENIED);
  EXPECT_THAT(status.error_message(), HasSubstr("tenant is \"team-b\", want the token's own"));
}

TEST_F(GenerationTenantsTest, AGatewaySaysForWhomItAsks) {
  v1::GenerateRequest request = Bounded(SomeTokens(20, 9), 4);
  request.set_tenant("team-b");
  EXPECT_EQ(TenantOf(Generate("gateway-token", request).second), "team-b");
}

TEST_F(GenerationTenantsTest, WorkersDoNotGenerate) {
  EXPECT_EQ(Generate("worker-token", Bounded(SomeTokens(20, 9), 4)).first.error_code(),
            grpc::StatusCode::PERMISSION_DENIED);
}

// As with an id that never was: the text is computed, and the other's sequence stays as it is.
TEST_F(GenerationTenantsTest, ResumingAnothersSequenceIsResumingNone) {
  const v1::GenerateRequest request = Bounded(SomeTokens(20, 9), 40);
  const auto [status, of_a] = Generate("a-token", request);
  ASSERT_TRUE(status.ok()) << status.error_message();
  group_.worker(0).Flush(absl::Seconds(10));
  v1::GenerateRequest resumed = request;
  resumed.mutable_resume()->set_sequence_id(of_a);
  resumed.mutable_resume()->set_from_token(static_cast<int32_t>(received_.size()));
  resumed.mutable_resume()->mutable_received_tokens()->Assign(received_.begin(), received_.end());
  const auto [by_b, of_b] = Generate("b-token", resumed);
  EXPECT_TRUE(by_b.ok()) << by_b.error_message();
  EXPECT_NE(of_b, of_a);
  EXPECT_EQ(TenantOf(of_b), "team-b");
  EXPECT_EQ(TenantOf(of_a), "team-a");
  EXPECT_THAT(group_.Metrics(0), HasSubstr("heavywater_sequences_restored_total 0"));
}

}  // namespace
}  // namespace heavywater
