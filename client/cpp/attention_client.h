// An engine's tie to one rank: AttentionService, with the names of the Python client.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/security/channels.h"
#include "heavywater/v1/attention.grpc.pb.h"

namespace heavywater {

// Attached to one rank of a group that was started with `model: none`, with a Step
// stream of its own. A tensor-parallel engine has one for each of its ranks, which
// make the same calls at the same time: Open(), End() and a prompt's last Attend() of
// a layer wait for the others. What is refused changes nothing. One thread.
class AttentionClient {
 public:
  using Stub = v1::AttentionService::StubInterface;

  // Attaches. `timeout` bounds the calls that are not the stream's. `security`: TLS, and
  // the token, which is a worker's.
  static absl::StatusOr<std::unique_ptr<AttentionClient>> Connect(
      const std::string& worker_address, const v1::AttachEngineRequest& shape,
      std::chrono::milliseconds timeout = std::chrono::milliseconds(30'000),
      const ChannelSecurity& security = {});
  // With a stub of the caller's, for tests.
  static absl::StatusOr<std::unique_ptr<AttentionClient>> Attach(
      std::unique_ptr<Stub> stub, const v1::AttachEngineRequest& shape,
      std::chrono::milliseconds timeout);
  // Ends the stream, which closes the sequences.
  ~AttentionClient();

  // This rank's heads and limits.
  const v1::AttachEngineResponse& attached() const { return attached_; }

  absl::StatusOr<v1::OpenedAttention> Open(const v1::OpenAttention& sequence);
  absl::Status Close(uint64_t sequence_id);
  absl::StatusOr<v1::BegunStep> Begin(const v1::BeginStep& step);
  // Rows of the step's items in one layer, this rank's heads: queries
  // [rows][num_query_heads][head_dim], keys and values [rows][num_kv_heads][head_dim];
  // returns what attention returns, like queries.
  absl::StatusOr<std::vector<float>> Attend(int layer, std::span<const float> queries,
                                            std::span<const float> keys,
                                            std::span<const float> values);
  absl::StatusOr<v1::EndedStep> End();

  // Counts, sets and picks, as they come.
  absl::StatusOr<std::vector<v1::KeptResponse>> Kept(uint64_t sequence_id);
  // K, then V of each position, every chunk's checksum verified: DATA_LOSS.
  absl::StatusOr<std::string> ReadKv(const v1::ReadKvRequest& request);

 private:
  using Stream = grpc::ClientReaderWriterInterface<v1::StepRequest, v1::StepResponse>;

  AttentionClient(std::unique_ptr<Stub> stub, std::chrono::milliseconds timeout)
      : stub_(std::move(stub)), timeout_(timeout) {}
  absl::StatusOr<v1::StepResponse> Call(v1::StepRequest request);

  std::unique_ptr<Channels> channels_;  // of the stub, where Connect() made it
  const std::unique_ptr<Stub> stub_;
  const std::chrono::milliseconds timeout_;
  v1::AttachEngineResponse attached_;
  grpc::ClientContext context_;  // of the stream
  std::unique_ptr<Stream> stream_;
  absl::Status ended_;  // what the stream has ended with
};

}  // namespace heavywater
