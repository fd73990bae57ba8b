// A group goes on with a sequence after a failure.
#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/sequence_registry.h"
#include "cache_service/registry/validate.h"

namespace heavywater {
namespace {

constexpr size_t kMaxSnapshotPart = size_t{1} << 20;

template <typename Value>
absl::Status CheckSame(const char* field, const Value& got, const Value& opened) {
  if (got == opened) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(field, " is \"", got, "\", the sequence was opened with \"", opened, "\""));
}

// The text so far, as both know it.
absl::Status CheckTokens(const google::protobuf::RepeatedField<int32_t>& got,
                         const std::vector<int32_t>& known) {
  const auto count = std::min(static_cast<size_t>(got.size()), known.size());
  const auto parts =
      std::mismatch(known.begin(), known.begin() + static_cast<int64_t>(count), got.begin());
  if (parts.first == known.begin() + static_cast<int64_t>(count)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("tokens[", parts.first - known.begin(), "] is ",
                                                    *parts.second, ", the sequence has ",
                                                    *parts.first));
}

}  // namespace

absl::Status SequenceRegistry::CheckReopen(const v1::ReopenSequenceRequest& request, int num_ranks,
                                           SequenceId id, const Record& record) {
  const v1::OpenSequenceRequest& opened = record.request;
  HW_RETURN_IF_ERROR(CheckSame("group", request.group(), opened.group()));
  HW_RETURN_IF_ERROR(CheckSame("number of ranks", num_ranks, record.num_ranks));
  HW_RETURN_IF_ERROR(CheckSame("tenant", request.tenant(), opened.tenant()));
  HW_RETURN_IF_ERROR(CheckSame("max_tokens", request.max_tokens(), opened.max_tokens()));
  HW_RETURN_IF_ERROR(CheckSame("prompt_tokens", request.prompt_tokens(), opened.prompt_tokens()));
  HW_RETURN_IF_ERROR(
      CheckSame("policy", request.policy().ShortDebugString(), opened.policy().ShortDebugString()));
  HW_RETURN_IF_ERROR(
      CheckSame("budget", request.budget().ShortDebugString(), opened.budget().ShortDebugString()));
  HW_RETURN_IF_ERROR(CheckTokens(request.tokens(), record.plans.tokens()));
  if (!record.plans.agreement().ok()) {
    return absl::DataLossError(record.plans.agreement().message());
  }
  if (store_.HostBytes(id) == store_.SequenceBytes(id)) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("of its ", store_.SequenceBytes(id), " bytes only ",
                                          store_.HostBytes(id), " are in host memory"));
}

absl::StatusOr<v1::ReopenSequenceResponse> SequenceRegistry::Reopen(
    const v1::ReopenSequenceRequest& request, int num_ranks) {
  MutexLock lock(&mutex_);
  const SequenceId id = request.sequence_id();
  HW_ASSIGN_OR_RETURN(const Records::iterator found, Find(id));
  Record& record = found->second;
  HW_RETURN_IF_ERROR(CheckReopen(request, num_ranks, id, record));
  Advance(id, record);
  const auto snapshot = record.plans.FindSnapshot(request.max_tokens_seen());
  if (snapshot == nullptr) {
    return absl::DataLossError(absl::StrCat("sequence ", id, " has no committed state of ",
                                            request.max_tokens_seen(), " tokens or fewer"));
  }
  snapshot_bytes_ -= record.plans.snapshot_bytes();
  record.plans.GoBackTo(snapshot->plan,
                        std::max<int64_t>(request.tokens_size(), snapshot->tokens_seen));
  snapshot_bytes_ += record.plans.snapshot_bytes();
  ++record.incarnation;
  record.lease_end = clock_.Now() + record.lease;
  record.last_use = clock_.Now();
  Save(id, record);
  v1::ReopenSequenceResponse response;
  response.set_lease_ms(absl::ToInt64Milliseconds(record.lease));
  response.set_plan(snapshot->plan);
  response.set_tokens_seen(snapshot->tokens_seen);
  response.set_incarnation(record.incarnation);
  return response;
}

bool SequenceRegistry::IsCurrent(const v1::PlanReport& report) const {
  MutexLock lock(&mutex_);
  const auto record = records_.find(report.sequence_id());
  return record == records_.end() || record->second.incarnation == report.incarnation();
}

absl::StatusOr<v1::ReadSnapshotResponse> SequenceRegistry::ReadSnapshot(
    const v1::ReadSnapshotRequest& request) {
  std::shared_ptr<const CommittedSnapshot> snapshot;
  {
    MutexLock lock(&mutex_);
    HW_ASSIGN_OR_RETURN(const Records::iterator found, Find(request.sequence_id()));
    snapshot = found->second.plans.SnapshotOfPlan(request.plan());
  }
  if (snapshot == nullptr) {
    return absl::NotFoundError(absl::StrCat("sequence ", request.sequence_id(),
                                            " has no committed state of plan ", request.plan()));
  }
  HW_RETURN_IF_ERROR(
      CheckInt("rank", request.rank(), 0, static_cast<int64_t>(snapshot->parts.size()) - 1));
  const std::string& part = snapshot->parts[static_cast<size_t>(request.rank())];
  HW_RETURN_IF_ERROR(CheckInt("offset", request.offset(), 0, static_cast<int64_t>(part.size())));
  v1::ReadSnapshotResponse response;
  response.set_total_bytes(static_cast<int64_t>(part.size()));
  response.set_data(part.substr(static_cast<size_t>(request.offset()), kMaxSnapshotPart));
  return response;
}

}  // namespace heavywater
