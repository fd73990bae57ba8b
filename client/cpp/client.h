// A thin client of Heavywater: generation, sequences and their pages, under the names that Python's
// Client has for them, which also has what is AdminClient's here. Requests and responses are the
// API's messages.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/security/channels.h"
#include "client/cpp/generation.h"
#include "client/cpp/read_retry.h"
#include "heavywater/v1/generation.grpc.pb.h"
#include "heavywater/v1/page_store.grpc.pb.h"
#include "heavywater/v1/sequence.grpc.pb.h"

namespace heavywater {

struct ClientOptions {
  std::string worker_address = "";            // rank 0 of a worker group, host:port
  std::string cache_address = "";             // the cache service, host:port
  std::chrono::milliseconds timeout{30'000};  // of every call but Generate
  // How long Generate tries to go on where its stream broke off, without a new token;
  // 0: not at all.
  std::chrono::milliseconds resume_timeout{60'000};
  ChannelSecurity security = {};  // TLS and the token; of both addresses
};

// What the server tells of its model: enough to tokenise and to chat.
struct ModelDescription {
  v1::ModelInfo info;
  std::vector<v1::Piece> pieces;    // by id
  std::vector<std::string> merges;  // by rank, "left right"
};

// Threads may share a client. Reads are repeated while a server is UNAVAILABLE, and
// Generate goes on where it broke off; nothing else is repeated. Calls whose address was not
// given are FAILED_PRECONDITION.
class Client {
 public:
  using GenerationStub = v1::GenerationService::StubInterface;
  using SequenceStub = v1::SequenceService::StubInterface;
  using PageStoreStub = v1::PageStoreService::StubInterface;

  // Connects lazily: an address where nobody listens fails at the first call.
  // INVALID_ARGUMENT when neither address is given, or for what `security` has wrong.
  static absl::StatusOr<std::unique_ptr<Client>> Connect(const ClientOptions& options);

  // With stubs of the caller's, for tests; any may be null.
  Client(std::unique_ptr<GenerationStub> generation, std::unique_ptr<SequenceStub> sequences,
         std::unique_ptr<PageStoreStub> pages, std::chrono::milliseconds timeout, Sleeper sleep,
         std::chrono::milliseconds resume_timeout = std::chrono::milliseconds{60'000});

  // Continues a prompt. The call is cancelled when the Generation goes first; it must
  // not outlive the client.
  absl::StatusOr<std::unique_ptr<Generation>> Generate(const v1::GenerateRequest& request);

  // Likewise, calling `on_token` for each token until the end; it returns false
  // to cancel, and the status is then CANCELLED.
  absl::StatusOr<v1::GenerateSummary> Generate(
      const v1::GenerateRequest& request,
      const std::function<bool(const v1::GenerateResponse&)>& on_token);

  absl::StatusOr<ModelDescription> GetModel();

  // Registers a sequence, which rank 0 does for every Generate.
  absl::StatusOr<v1::OpenSequenceResponse> Open(const v1::OpenSequenceRequest& request);
  // With all tokens reported so far.
  absl::StatusOr<v1::Sequence> Get(uint64_t sequence_id);
  // All sequences (of a group), without tokens.
  absl::StatusOr<std::vector<v1::Sequence>> List(const std::string& group = "");
  // Ends the sequence's lease and frees its pages.
  absl::Status Close(uint64_t sequence_id);
  // Takes the sequence off the devices and keeps it for `ttl_ms` (0: as long as the
  // service lets). A further turn is a Generate whose request has its id in
  // continue_sequence_id and its text so far in tokens, what it was given and has
  // generated; new ones follow there or as a suffix.
  absl::StatusOr<v1::SuspendSequenceResponse> Suspend(uint64_t sequence_id, int64_t ttl_ms = 0);
  // A suspended sequence gets its ordinary lease again; a further turn does so, too.
  absl::Status Resume(uint64_t sequence_id);

  // The sequence, which must not run, goes back to its first `tokens` tokens, at least its
  // prompt. As SequenceService::Truncate says.
  absl::StatusOr<v1::TruncateSequenceResponse> Truncate(uint64_t sequence_id, int64_t tokens);

  // A second sequence that is as this one, which must not run, is now; both go on by a Generate
  // that continues them. As SequenceService::Fork says; a request id is added when absent.
  absl::StatusOr<v1::ForkSequenceResponse> Fork(const v1::ForkSequenceRequest& request);

  // Heavy, recent, sink and demoted positions; `layers` empty = all.
  absl::StatusOr<std::vector<v1::SequenceSet>> GetSets(uint64_t sequence_id,
                                                       const std::vector<int>& layers = {});

  // Rows of one page (K, then V of each position), every chunk's checksum
  // verified: DATA_LOSS when one does not match.
  absl::StatusOr<std::string> Read(const v1::ReadRequest& request);

 private:
  std::unique_ptr<Channels> channels_;  // of the stubs, where Connect() made them
  std::unique_ptr<GenerationStub> generation_;
  std::unique_ptr<SequenceStub> sequences_;
  std::unique_ptr<PageStoreStub> pages_;
  std::chrono::milliseconds timeout_;
  Sleeper sleep_;
  std::chrono::milliseconds resume_timeout_;
};

}  // namespace heavywater
