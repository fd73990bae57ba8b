#include "client/cpp/generation.h"

#include <algorithm>
#include <utility>

#include "client/cpp/rpc_status.h"

namespace heavywater {
namespace {

constexpr std::chrono::milliseconds kFirstBackoff{100};
constexpr std::chrono::milliseconds kMaxBackoff{1000};

}  // namespace

Generation::Generation(Call call, ResumeOptions resume)
    : call_(std::move(call)), resume_(std::move(resume)), backoff_(kFirstBackoff) {}

Generation::Generation(std::unique_ptr<grpc::ClientContext> context, std::unique_ptr<Reader> reader)
    : Generation(Call{std::move(context), std::move(reader)}, ResumeOptions()) {}

Generation::~Generation() {
  if (ended_.has_value()) return;
  call_.context->TryCancel();
  // gRPC wants every stream finished; after the cancel this does not wait.
  v1::GenerateResponse ignored;
  while (call_.reader->Read(&ignored)) {
  }
  (void)call_.reader->Finish();
}

std::optional<v1::GenerateResponse> Generation::Read() {
  v1::GenerateResponse response;
  while (call_.reader->Read(&response)) {
    if (response.sequence_id() != 0) sequence_id_ = response.sequence_id();
    if (response.has_summary()) summary_ = response.summary();
    if (response.has_index()) return response;
  }
  return std::nullopt;
}

absl::StatusOr<std::optional<v1::GenerateResponse>> Generation::Next() {
  while (!ended_.has_value()) {
    std::optional<v1::GenerateResponse> response = Read();
    if (response.has_value()) {
      backoff_ = kFirstBackoff;
      broken_since_.reset();
      if (resume_.generate != nullptr) {
        resume_.request.mutable_resume()->add_received_tokens(response->token());
      }
      return response;
    }
    const absl::Status status = FromGrpc(call_.reader->Finish());
    if (MayResume(status)) {
      OpenAgain();
    } else {
      ended_ = status;
    }
  }
  if (!ended_->ok()) return *ended_;
  return std::nullopt;
}

bool Generation::MayResume(const absl::Status& status) {
  if (!absl::IsUnavailable(status) || sequence_id_ == 0 || resume_.generate == nullptr) {
    return false;
  }
  const auto now = std::chrono::steady_clock::now();
  if (!broken_since_.has_value()) broken_since_ = now;
  return now - *broken_since_ < resume_.timeout;
}

void Generation::OpenAgain() {
  resume_.sleep(backoff_);
  backoff_ = std::min(2 * backoff_, kMaxBackoff);
  v1::ResumePoint& point = *resume_.request.mutable_resume();
  point.set_sequence_id(sequence_id_);
  point.set_from_token(point.received_tokens_size());
  call_ = resume_.generate(resume_.request);
}

absl::StatusOr<v1::GenerateSummary> Generation::Summary() const {
  if (summary_.has_value()) return *summary_;
  return absl::FailedPreconditionError(
      "the summary comes with the last message: read the tokens first");
}

}  // namespace heavywater
