// Sequences that go back to an earlier token.
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/sequence_registry.h"

namespace heavywater {
namespace {

absl::Status CheckTruncation(int64_t tokens, int64_t prompt, int64_t known) {
  if (tokens >= prompt && tokens <= known) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat("tokens is ", tokens, ", want from ", prompt,
                                            ", the sequence's prompt, to ", known,
                                            ", all that it has seen"));
}

}  // namespace

// A rank that has died is not heard of for longer than its lease.
bool SequenceRegistry::MayRun(const Record& record) const {
  if (record.plans.all_finished()) return false;
  return clock_.Now() < record.last_listed + options_.rank_lease;
}

absl::StatusOr<v1::TruncateSequenceResponse> SequenceRegistry::Truncate(
    const v1::TruncateSequenceRequest& request, const Viewer& viewer) {
  MutexLock lock(&mutex_);
  const SequenceId id = request.sequence_id();
  HW_ASSIGN_OR_RETURN(const Records::iterator found, Find(id, viewer));
  Record& record = found->second;
  HW_RETURN_IF_ERROR(record.plans.agreement());
  if (MayRun(record)) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", id, " runs, want one that has ended or was suspended"));
  }
  HW_RETURN_IF_ERROR(CheckTruncation(request.tokens(), record.request.prompt_tokens(),
                                     static_cast<int64_t>(record.plans.tokens().size())));
  Advance(id, record);
  const auto snapshot = record.plans.FindSnapshot(request.tokens());
  if (snapshot == nullptr) {
    return absl::FailedPreconditionError(absl::StrCat(
        "sequence ", id, " has no committed state of ", request.tokens(), " tokens or fewer"));
  }
  record.plans.Truncate(snapshot->plan, request.tokens());
  record.last_use = clock_.Now();
  Save(id, record);
  // After the record: a restart between the two finds more than it needs.
  HW_RETURN_IF_ERROR(store_.Truncate(id, request.tokens()));
  v1::TruncateSequenceResponse response;
  response.set_tokens_seen(snapshot->tokens_seen);
  return response;
}

}  // namespace heavywater
