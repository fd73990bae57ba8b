// The stream of one Generate call.
#pragma once

#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "heavywater/v1/generation.grpc.pb.h"

namespace heavywater {

// Used by one thread. Destroying it before the end cancels the call, and the
// server frees what the sequence held on the device.
class Generation {
 public:
  using Reader = grpc::ClientReaderInterface<v1::GenerateResponse>;

  Generation(std::unique_ptr<grpc::ClientContext> context, std::unique_ptr<Reader> reader);
  ~Generation();
  Generation(const Generation&) = delete;
  Generation& operator=(const Generation&) = delete;

  // The next token, nullopt at the end, or why the call failed.
  absl::StatusOr<std::optional<v1::GenerateResponse>> Next();

  // Comes with the last message: FAILED_PRECONDITION before the end.
  absl::StatusOr<v1::GenerateSummary> Summary() const;

  // In the cache service; 0 before the first token.
  uint64_t sequence_id() const { return sequence_id_; }

 private:
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<Reader> reader_;
  uint64_t sequence_id_ = 0;
  std::optional<v1::GenerateSummary> summary_;
  // Set once the stream has ended: what Next() returns from then on.
  std::optional<absl::Status> ended_;
};

}  // namespace heavywater
