#include "worker/server/generation_engine.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {

absl::StatusOr<std::shared_ptr<Generation>> GenerationEngine::Start(
    const v1::GenerateRequest& proto) {
  HW_ASSIGN_OR_RETURN(GenerationRequest request, ParseGenerateRequest(proto, limits_));
  HW_RETURN_IF_ERROR(memory_.Check(request.sequence));
  HW_RETURN_IF_ERROR(queue_.CheckRoom());
  HW_RETURN_IF_ERROR(ClaimRequestId(proto.request_id()));
  auto generation = OpenAndQueue(std::move(request));
  if (!generation.ok()) ReleaseRequestId(proto.request_id());
  return generation;
}

absl::StatusOr<std::shared_ptr<Generation>> GenerationEngine::OpenAndQueue(
    GenerationRequest request) {
  HW_ASSIGN_OR_RETURN(const OpenedSequence opened, sequences_.Open({.options = request.sequence,
                                                                    .budget = request.budget,
                                                                    .tenant = request.tenant}));
  auto generation = std::make_shared<Generation>(std::move(request), opened);
  const absl::Status queued = queue_.Submit(generation);
  if (queued.ok()) return generation;
  sequences_.Release(opened.id, /*discard=*/true);
  return queued;
}

void GenerationEngine::End(const Generation& generation, bool any_output) {
  sequences_.Release(generation.sequence, /*discard=*/!any_output);
  ReleaseRequestId(generation.request.request_id);
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
