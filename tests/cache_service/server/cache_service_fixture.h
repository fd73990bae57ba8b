// A cache service in this process, and clients of it over a real channel.
#pragma once

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/ids.h"
#include "cache_service/security/channels.h"
#include "cache_service/server/cache_server.h"
#include "heavywater/v1/admin.grpc.pb.h"
#include "heavywater/v1/group.grpc.pb.h"
#include "heavywater/v1/page_store.grpc.pb.h"
#include "heavywater/v1/sequence.grpc.pb.h"
#include "tests/cache_service/registry/fake_clock.h"

namespace heavywater {

// Where rows lie, with the bytes that a test writes there: different for every
// sequence, layer, head and position.
struct TestRows {
  SequenceId sequence = 0;
  int layer = 0;
  int kv_head = 0;
  int64_t first_position = 0;
  int64_t num_positions = 0;

  std::string Bytes(int64_t row_bytes) const;
};

class CacheServiceFixture : public ::testing::Test {
 protected:
  CacheServiceFixture();
  void SetUp() override { Restart(); }
  // With config_ as it is now.
  void Restart();

  // All ranks join with fingerprint_; epoch_ is set.
  void Form(int num_ranks);
  absl::StatusOr<v1::JoinResponse> Join(int rank, int size, int64_t client_deadline_ms = 20'000);
  absl::StatusOr<SequenceId> Open(const std::string& request_id, int64_t prompt_tokens = 1);
  absl::Status Close(SequenceId sequence);
  absl::StatusOr<v1::ReserveResponse> Reserve(SequenceId sequence, int64_t num_pages, int rank = 0);
  // In chunks of at most 1 MiB on one stream.
  absl::StatusOr<int64_t> Write(const TestRows& rows);
  absl::StatusOr<int64_t> WriteChunks(const std::vector<v1::WriteRequest>& chunks);
  std::vector<v1::WriteRequest> ChunksOf(const TestRows& rows) const;
  absl::Status Commit(SequenceId sequence, int64_t tokens);
  absl::StatusOr<std::string> Read(const TestRows& rows);
  v1::ReadRequest ReadRequest(const TestRows& rows) const;
  v1::TierStats HostTier();

  int64_t row_bytes() const { return 2 * fingerprint_.head_dim() * 2; }  // bf16

  v1::CacheConfig config_;
  v1::Fingerprint fingerprint_;
  FakeClock clock_;
  ChannelSecurity security_;  // of the stubs below
  std::unique_ptr<CacheServer> server_;
  std::unique_ptr<Channels> channels_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::GroupService::Stub> groups_;
  std::unique_ptr<v1::SequenceService::Stub> sequences_;
  std::unique_ptr<v1::PageStoreService::Stub> pages_;
  std::unique_ptr<v1::AdminService::Stub> admin_;
  Epoch epoch_ = 0;
};

}  // namespace heavywater
