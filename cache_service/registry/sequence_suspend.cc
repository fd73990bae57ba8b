// Sequences that are kept without being on a device.
#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/sequence_registry.h"
#include "cache_service/registry/validate.h"

namespace heavywater {

void SequenceRegistry::RenewLease(Record& record) {
  record.write_end = std::max(record.write_end, clock_.Now() + record.lease);
  record.lease_end = std::max(record.lease_end, record.write_end);
}

absl::StatusOr<v1::SuspendSequenceResponse> SequenceRegistry::Suspend(
    const v1::SuspendSequenceRequest& request, const Viewer& viewer) {
  const int64_t most = absl::ToInt64Milliseconds(options_.suspend_ttl);
  HW_RETURN_IF_ERROR(CheckInt("ttl_ms", request.ttl_ms(), 0, most));
  MutexLock lock(&mutex_);
  const SequenceId id = request.sequence_id();
  HW_ASSIGN_OR_RETURN(const Records::iterator found, Find(id, viewer));
  Record& record = found->second;
  HW_RETURN_IF_ERROR(record.plans.agreement());
  Advance(id, record);
  const auto snapshot = record.plans.FindSnapshot(std::numeric_limits<int64_t>::max());
  if (snapshot == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrCat("sequence ", id, " has no committed state yet, from which it could go on"));
  }
  // One that is suspended already only begins its time anew.
  if (record.suspended == absl::ZeroDuration()) {
    HW_RETURN_IF_ERROR(CheckKept(id, "suspended sequences"));
  }
  record.suspended =
      request.ttl_ms() == 0 ? options_.suspend_ttl : absl::Milliseconds(request.ttl_ms());
  record.lease_end = clock_.Now() + std::max(record.suspended, record.lease);
  record.last_use = clock_.Now();
  Save(id, record);
  v1::SuspendSequenceResponse response;
  response.set_ttl_ms(absl::ToInt64Milliseconds(record.suspended));
  response.set_tokens_seen(snapshot->tokens_seen);
  return response;
}

absl::StatusOr<v1::ResumeSequenceResponse> SequenceRegistry::Resume(
    const v1::ResumeSequenceRequest& request, const Viewer& viewer) {
  MutexLock lock(&mutex_);
  HW_ASSIGN_OR_RETURN(const Records::iterator found, Find(request.sequence_id(), viewer));
  Record& record = found->second;
  if (record.suspended > absl::ZeroDuration()) {
    record.suspended = absl::ZeroDuration();
    record.lease_end = clock_.Now();
    Save(request.sequence_id(), record);
  }
  RenewLease(record);
  v1::ResumeSequenceResponse response;
  response.set_lease_ms(absl::ToInt64Milliseconds(record.lease));
  return response;
}

void SequenceRegistry::AddSuspended(const google::protobuf::RepeatedField<uint64_t>& ids,
                                    google::protobuf::RepeatedField<uint64_t>* suspended) const {
  MutexLock lock(&mutex_);
  for (const SequenceId id : ids) {
    const auto record = records_.find(id);
    if (record != records_.end() && record->second.suspended > absl::ZeroDuration()) {
      suspended->Add(id);
    }
  }
}

}  // namespace heavywater
