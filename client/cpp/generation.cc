#include "client/cpp/generation.h"

#include <utility>

#include "client/cpp/rpc_status.h"

namespace heavywater {

Generation::Generation(std::unique_ptr<grpc::ClientContext> context, std::unique_ptr<Reader> reader)
    : context_(std::move(context)), reader_(std::move(reader)) {}

Generation::~Generation() {
  if (ended_.has_value()) return;
  context_->TryCancel();
  // gRPC wants every stream finished; after the cancel this does not wait.
  v1::GenerateResponse ignored;
  while (reader_->Read(&ignored)) {
  }
  (void)reader_->Finish();
}

absl::StatusOr<std::optional<v1::GenerateResponse>> Generation::Next() {
  v1::GenerateResponse response;
  while (!ended_.has_value() && reader_->Read(&response)) {
    if (response.sequence_id() != 0) sequence_id_ = response.sequence_id();
    if (response.has_summary()) summary_ = response.summary();
    if (response.has_index()) return response;
  }
  if (!ended_.has_value()) ended_ = FromGrpc(reader_->Finish());
  if (!ended_->ok()) return *ended_;
  return std::nullopt;
}

absl::StatusOr<v1::GenerateSummary> Generation::Summary() const {
  if (summary_.has_value()) return *summary_;
  return absl::FailedPreconditionError(
      "the summary comes with the last message: read the tokens first");
}

}  // namespace heavywater
