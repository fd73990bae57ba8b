// The stream of one Generate call.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/cpp/read_retry.h"
#include "heavywater/v1/generation.grpc.pb.h"

namespace heavywater {

// Used by one thread. Destroying it before the end cancels the call, and the
// server frees what the sequence held on the device.
//
// A stream that ends with UNAVAILABLE after the request was accepted (its server or a
// rank has died, the connection broke) goes on by itself, each token exactly once, as
// soon as a server is there again.
class Generation {
 public:
  using Reader = grpc::ClientReaderInterface<v1::GenerateResponse>;
  struct Call {
    std::unique_ptr<grpc::ClientContext> context;
    std::unique_ptr<Reader> reader;
  };
  struct ResumeOptions {
    v1::GenerateRequest request;
    std::function<Call(const v1::GenerateRequest&)> generate;  // opens a call
    std::chrono::milliseconds timeout{0};                      // without a new token
    Sleeper sleep;
  };

  Generation(Call call, ResumeOptions resume);
  // One that does not go on.
  Generation(std::unique_ptr<grpc::ClientContext> context, std::unique_ptr<Reader> reader);
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // The next token, nullopt at the end, or why the call failed.
  absl::StatusOr<std::optional<v1::GenerateResponse>> Next();

  // Comes with the last message: FAILED_PRECONDITION before the end.
  absl::StatusOr<v1::GenerateSummary> Summary() const;

  // In the cache service; 0 before the request was accepted. Another one once the tokens
  // had to be computed again.
  uint64_t sequence_id() const { return sequence_id_; }

 private:
  // The next token of the call under way; nullopt when it has ended.
  std::optional<v1::GenerateResponse> Read();
  bool MayResume(const absl::Status& status);
  void OpenAgain();

  Call call_;
  ResumeOptions resume_;  // request.resume holds the tokens received
  std::chrono::milliseconds backoff_;
  std::optional<std::chrono::steady_clock::time_point> broken_since_;
  uint64_t sequence_id_ = 0;
  std::optional<v1::GenerateSummary> summary_;
  // Set once the stream has ended: what Next() returns from then on.
  std::optional<absl::Status> ended_;
};

}  // namespace heavywater
