#include "worker/server/generation_engine.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"

namespace heavywater {
namespace {

// For the step to close what a client has left.
constexpr absl::Duration kEndTimeout = absl::Seconds(3);

}  // namespace

absl::StatusOr<std::shared_ptr<Generation>> GenerationEngine::Start(
    const v1::GenerateRequest& proto) {
  HW_ASSIGN_OR_RETURN(GenerationRequest request, ParseGenerateRequest(proto, limits_));
  HW_RETURN_IF_ERROR(memory_.Check(request.sequence));
  HW_RETURN_IF_ERROR(queue_.CheckRoom());
  HW_RETURN_IF_ERROR(EndRunning(request.resume_sequence));
  HW_RETURN_IF_ERROR(ClaimRequestId(proto.request_id()));
  auto generation = OpenAndQueue(std::move(request));
  if (!generation.ok()) ReleaseRequestId(proto.request_id());
  return generation;
}

absl::StatusOr<std::shared_ptr<Generation>> GenerationEngine::OpenAndQueue(
    GenerationRequest request) {
  HW_ASSIGN_OR_RETURN(const OpenedSequence opened, OpenSequence(request));
  auto generation = std::make_shared<Generation>(std::move(request), opened);
  const absl::Status queued = queue_.Submit(generation);
  if (!queued.ok()) {
    sequences_.Release(opened.id, /*discard=*/!opened.restored());
    return queued;
  }
  MutexLock lock(&mutex_);
  running_[opened.id] = generation;
  return generation;
}

absl::StatusOr<OpenedSequence> GenerationEngine::OpenSequence(const GenerationRequest& request) {
  if (request.resume_sequence != 0) {
    auto reopened = Reopen(request);
    if (reopened.ok() || absl::IsUnavailable(reopened.status())) return reopened;
    LogWarn("sequence is computed again from its tokens",
            {{"sequence", request.resume_sequence}, {"reason", reopened.status().ToString()}});
  }
  return sequences_.Open(
      {.options = request.sequence, .budget = request.budget, .tenant = request.tenant});
}

absl::StatusOr<OpenedSequence> GenerationEngine::Reopen(const GenerationRequest& request) {
  std::vector<int32_t> text = request.prompt;
  text.insert(text.end(), request.suffix.begin(), request.suffix.end());
  text.insert(text.end(), request.received.begin(), request.received.end());
  // The last one is to be taken in again, for the logits after it.
  const auto max_tokens_seen = static_cast<int64_t>(text.size()) - 1;
  return sequences_.Reopen(
      request.resume_sequence,
      {.options = request.sequence, .budget = request.budget, .tenant = request.tenant}, text,
      max_tokens_seen);
}

absl::Status GenerationEngine::EndRunning(SequenceId sequence) {
  const absl::Time deadline = absl::Now() + kEndTimeout;
  MutexLock lock(&mutex_);
  const auto running = running_.find(sequence);
  if (running == running_.end()) return absl::OkStatus();
  running->second->responses.Cancel();
  queue_.Wake();
  while (running_.contains(sequence) && absl::Now() < deadline) {
    changed_.WaitWithTimeout(&mutex_, deadline - absl::Now());
  }
  if (!running_.contains(sequence)) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("sequence ", sequence, " still runs for another call"));
}

void GenerationEngine::End(const Generation& generation, bool any_output) {
  // What goes on is kept, whatever this call has told its client.
  const bool keep = any_output || generation.opened.restored();
  sequences_.Release(generation.sequence, /*discard=*/!keep || generation.restore_failed);
  ReleaseRequestId(generation.request.request_id);
  MutexLock lock(&mutex_);
  running_.erase(generation.sequence);
  changed_.SignalAll();
}

absl::Status GenerationEngine::ClaimRequestId(const std::string& request_id) {
  if (request_id.empty()) return absl::OkStatus();
  MutexLock lock(&mutex_);
  if (request_ids_.insert(request_id).second) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat("request_id \"", request_id, "\" is that of a request that runs"));
}

void GenerationEngine::ReleaseRequestId(const std::string& request_id) {
  MutexLock lock(&mutex_);
  request_ids_.erase(request_id);
}

}  // namespace heavywater
