#include "tests/worker/server/test_cache_service.h"

#include "absl/time/clock.h"
#include "cache_service/base/check.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/server/cache_config.h"
#include "gtest/gtest.h"

namespace heavywater {

TestCacheService::TestCacheService(Clock& clock) : clock_(clock), config_(DefaultCacheConfig()) {
  config_.set_listen_address("127.0.0.1:0");
  config_.set_metrics_address("");
  config_.set_host_bytes(16 << 20);
  config_.set_drain_ms(0);
  Start();
}

void TestCacheService::Start() {
  auto server = CacheServer::Start(config_, clock_);
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  config_.set_listen_address(server_->address());
  stop_ = std::make_unique<StopFlag>();
  ticker_ = std::thread([this] {
    while (!stop_->WaitFor(absl::Milliseconds(20))) server_->Tick();
  });
}

void TestCacheService::Stop() {
  if (server_ == nullptr) return;
  stop_->Stop();
  ticker_.join();
  server_.reset();
}

std::shared_ptr<grpc::Channel> TestCacheService::Channel() const {
  return grpc::CreateChannel(address(), grpc::InsecureChannelCredentials());
}

absl::StatusOr<v1::Sequence> TestCacheService::Get(SequenceId sequence) {
  v1::GetSequenceRequest request;
  request.set_sequence_id(sequence);
  grpc::ClientContext context;
  v1::Sequence response;
  const auto stub = v1::SequenceService::NewStub(Channel());
  const absl::Status status = FromGrpcStatus(stub->Get(&context, request, &response));
  if (!status.ok()) return status;
  return response;
}

std::vector<v1::SequenceSet> TestCacheService::SetsAt(SequenceId sequence, int64_t plan) {
  const auto stub = v1::SequenceService::NewStub(Channel());
  const absl::Time deadline = absl::Now() + absl::Seconds(10);
  std::vector<v1::SequenceSet> sets;
  while (absl::Now() < deadline) {
    v1::GetSetsRequest request;
    request.set_sequence_id(sequence);
    grpc::ClientContext context;
    const auto reader = stub->GetSets(&context, request);
    sets.clear();
    v1::SequenceSet set;
    while (reader->Read(&set)) sets.push_back(set);
    const grpc::Status status = reader->Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    if (!sets.empty() && sets[0].plan() == plan) return sets;
    absl::SleepFor(absl::Milliseconds(20));
  }
  ADD_FAILURE() << "plan " << plan << " was not committed, last is "
                << (sets.empty() ? 0 : sets[0].plan());
  return {};
}

absl::StatusOr<std::string> TestCacheService::ReadRow(SequenceId sequence, int layer, int kv_head,
                                                      int64_t position) {
  v1::ReadRequest request;
  request.set_sequence_id(sequence);
  request.set_layer(layer);
  request.set_kv_head(kv_head);
  request.set_first_position(position);
  request.set_num_positions(1);
  grpc::ClientContext context;
  const auto stub = v1::PageStoreService::NewStub(Channel());
  const auto reader = stub->Read(&context, request);
  std::string rows;
  v1::ReadResponse response;
  while (reader->Read(&response)) rows += response.rows();
  const absl::Status status = FromGrpcStatus(reader->Finish());
  if (!status.ok()) return status;
  return rows;
}

absl::Status TestCacheService::Close(SequenceId sequence) {
  v1::CloseSequenceRequest request;
  request.set_sequence_id(sequence);
  grpc::ClientContext context;
  v1::CloseSequenceResponse response;
  const auto stub = v1::SequenceService::NewStub(Channel());
  return FromGrpcStatus(stub->Close(&context, request, &response));
}

}  // namespace heavywater
