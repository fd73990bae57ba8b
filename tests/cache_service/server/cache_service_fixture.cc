#include "tests/cache_service/server/cache_service_fixture.h"

#include <algorithm>
#include <random>
#include <span>
#include <thread>

#include "cache_service/base/crc32c.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/server/cache_config.h"
#include "tests/cache_service/registry/requests.h"

namespace heavywater {
namespace {

uint32_t Crc(const std::string& bytes) {
  return Crc32c(std::as_bytes(std::span<const char>(bytes)));
}

}  // namespace

std::string TestRows::Bytes(int64_t row_bytes) const {
  std::string bytes;
  bytes.reserve(num_positions * row_bytes);
  for (int64_t position = first_position; position < first_position + num_positions; ++position) {
    std::minstd_rand random(static_cast<uint32_t>(1 + sequence * 1000003 + layer * 10007 +
                                                  kv_head * 101 + position * 7919));
    for (int64_t i = 0; i < row_bytes; i += 2) {
      const auto bits = random();
      bytes.push_back(static_cast<char>(bits >> 8));
      bytes.push_back(static_cast<char>(bits >> 16));
    }
  }
  return bytes;
}

CacheServiceFixture::CacheServiceFixture()
    : config_(DefaultCacheConfig()), fingerprint_(TestFingerprint()) {
  EXPECT_TRUE(InitLogging({.level = "error", .process = "test"}).ok());
  config_.set_listen_address("127.0.0.1:0");
  config_.set_metrics_address("");
  config_.set_host_bytes(1 << 20);
  config_.set_drain_ms(200);
}

void CacheServiceFixture::Restart() {
  server_.reset();
  auto server = CacheServer::Start(config_, clock_);
  ASSERT_TRUE(server.ok()) << server.status();
  server_ = *std::move(server);
  channels_ = *Channels::Create(security_);
  channel_ = *channels_->Make(server_->address(), grpc::ChannelArguments());
  groups_ = v1::GroupService::NewStub(channel_);
  sequences_ = v1::SequenceService::NewStub(channel_);
  pages_ = v1::PageStoreService::NewStub(channel_);
  admin_ = v1::AdminService::NewStub(channel_);
}

absl::StatusOr<v1::JoinResponse> CacheServiceFixture::Join(int rank, int size,
                                                           int64_t client_deadline_ms) {
  v1::JoinRequest request = TestJoin(rank, size);
  *request.mutable_fingerprint() = fingerprint_;
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() +
                       std::chrono::milliseconds(client_deadline_ms));
  v1::JoinResponse response;
  const grpc::Status status = groups_->Join(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

void CacheServiceFixture::Form(int num_ranks) {
  std::vector<std::thread> ranks;
  std::vector<absl::StatusOr<v1::JoinResponse>> joined(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) {
    ranks.emplace_back([&, rank] { joined[rank] = Join(rank, num_ranks); });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const auto& response : joined) {
    ASSERT_TRUE(response.ok()) << response.status();
    epoch_ = response->epoch();
  }
}

absl::StatusOr<SequenceId> CacheServiceFixture::Open(const std::string& request_id,
                                                     int64_t prompt_tokens) {
  v1::OpenSequenceRequest request = TestOpen(request_id, epoch_);
  *request.mutable_fingerprint() = fingerprint_;
  request.set_prompt_tokens(prompt_tokens);
  request.set_max_tokens(100'000);
  grpc::ClientContext context;
  v1::OpenSequenceResponse response;
  const grpc::Status status = sequences_->Open(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response.sequence_id();
}

absl::Status CacheServiceFixture::Close(SequenceId sequence) {
  v1::CloseSequenceRequest request;
  request.set_sequence_id(sequence);
  grpc::ClientContext context;
  v1::CloseSequenceResponse response;
  return FromGrpcStatus(sequences_->Close(&context, request, &response));
}

absl::StatusOr<v1::ReserveResponse> CacheServiceFixture::Reserve(SequenceId sequence,
                                                                 int64_t num_pages, int rank) {
  v1::ReserveRequest request;
  request.set_sequence_id(sequence);
  request.set_epoch(epoch_);
  request.set_rank(rank);
  request.set_num_kv_heads(fingerprint_.num_kv_heads());
  request.set_num_pages(num_pages);
  grpc::ClientContext context;
  v1::ReserveResponse response;
  const grpc::Status status = pages_->Reserve(&context, request, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

std::vector<v1::WriteRequest> CacheServiceFixture::ChunksOf(const TestRows& rows) const {
  std::vector<v1::WriteRequest> chunks;
  const int64_t max_rows = std::max<int64_t>(1, (1 << 20) / row_bytes());
  for (int64_t done = 0; done < rows.num_positions; done += max_rows) {
    TestRows part = rows;
    part.first_position += done;
    part.num_positions = std::min(max_rows, rows.num_positions - done);
    v1::WriteRequest& chunk = chunks.emplace_back();
    chunk.set_sequence_id(rows.sequence);
    chunk.set_epoch(epoch_);
    chunk.set_layer(rows.layer);
    chunk.set_kv_head(rows.kv_head);
    chunk.set_first_position(part.first_position);
    chunk.set_rows(part.Bytes(row_bytes()));
    chunk.set_crc32c(Crc(chunk.rows()));
  }
  return chunks;
}

absl::StatusOr<int64_t> CacheServiceFixture::WriteChunks(
    const std::vector<v1::WriteRequest>& chunks) {
  grpc::ClientContext context;
  v1::WriteResponse response;
  const auto stream = pages_->Write(&context, &response);
  for (const v1::WriteRequest& chunk : chunks) {
    if (!stream->Write(chunk)) break;
  }
  stream->WritesDone();
  const grpc::Status status = stream->Finish();
  if (!status.ok()) return FromGrpcStatus(status);
  return response.rows_written();
}

absl::StatusOr<int64_t> CacheServiceFixture::Write(const TestRows& rows) {
  return WriteChunks(ChunksOf(rows));
}

absl::Status CacheServiceFixture::Commit(SequenceId sequence, int64_t tokens) {
  v1::CommitRequest request;
  request.set_sequence_id(sequence);
  request.set_epoch(epoch_);
  request.set_tokens(tokens);
  grpc::ClientContext context;
  v1::CommitResponse response;
  return FromGrpcStatus(pages_->Commit(&context, request, &response));
}

v1::ReadRequest CacheServiceFixture::ReadRequest(const TestRows& rows) const {
  v1::ReadRequest request;
  request.set_sequence_id(rows.sequence);
  request.set_layer(rows.layer);
  request.set_kv_head(rows.kv_head);
  request.set_first_position(rows.first_position);
  request.set_num_positions(rows.num_positions);
  return request;
}

absl::StatusOr<std::string> CacheServiceFixture::Read(const TestRows& rows) {
  grpc::ClientContext context;
  const auto stream = pages_->Read(&context, ReadRequest(rows));
  std::string bytes;
  v1::ReadResponse chunk;
  while (stream->Read(&chunk)) {
    EXPECT_EQ(Crc(chunk.rows()), chunk.crc32c());
    EXPECT_LE(chunk.rows().size(), 1u << 20);
    bytes += chunk.rows();
  }
  const grpc::Status status = stream->Finish();
  if (!status.ok()) return FromGrpcStatus(status);
  return bytes;
}

v1::TierStats CacheServiceFixture::HostTier() {
  grpc::ClientContext context;
  v1::StatsResponse response;
  EXPECT_TRUE(admin_->Stats(&context, {}, &response).ok());
  EXPECT_EQ(response.tiers_size(), 1);
  const v1::TierStats& host = response.tiers(0);
  EXPECT_EQ(host.free_bytes() + host.used_bytes(), host.total_bytes());
  return host;
}

}  // namespace heavywater
