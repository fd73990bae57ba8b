#include "cache_service/registry/registry.h"

#include <algorithm>

#include "cache_service/base/status.h"
#include "cache_service/registry/layout.h"

namespace heavywater {

Registry::Registry(const RegistryOptions& options, PageStore& store, Clock& clock)
    : options_(options),
      store_(store),
      clock_(clock),
      groups_(options, clock),
      sequences_(options, store, clock) {}

absl::StatusOr<v1::OpenSequenceResponse> Registry::Open(const v1::OpenSequenceRequest& request) {
  HW_ASSIGN_OR_RETURN(const GroupRegistry::Formation formation,
                      groups_.Find(request.group(), request.epoch()));
  HW_RETURN_IF_ERROR(CompareFingerprints(request.fingerprint(), "the request has",
                                         formation.fingerprint, "the group has"));
  return sequences_.Open(request, formation.size);
}

absl::StatusOr<v1::HeartbeatResponse> Registry::Heartbeat(const v1::HeartbeatRequest& request) {
  HW_RETURN_IF_ERROR(groups_.Renew(request.group(), request.rank(), request.epoch()));
  v1::HeartbeatResponse response;
  const absl::Status agreement = sequences_.Renew(request.group(), request.sequence_ids(),
                                                  response.mutable_unknown_sequence_ids());
  StopWriters(request.group(), request.rank(), request.sequence_ids());
  // Those that are gone come first: their ranks must stop writing.
  if (response.unknown_sequence_ids().empty()) HW_RETURN_IF_ERROR(agreement);
  return response;
}

absl::StatusOr<v1::ReportPlanResponse> Registry::ReportPlan(const v1::ReportPlanRequest& request) {
  HW_RETURN_IF_ERROR(groups_.CheckRank(request.group(), request.rank(), request.epoch()));
  v1::ReportPlanResponse response;
  const absl::Status status = sequences_.Report(request, response.mutable_unknown_sequence_ids());
  if (absl::IsInvalidArgument(status)) return status;
  for (const v1::PlanReport& report : request.reports()) {
    if (!report.finished() || !IsWriterOf(request.group(), report.sequence_id())) continue;
    store_.StopWriter(report.sequence_id(), request.rank());
  }
  HW_RETURN_IF_ERROR(status);
  return response;
}

absl::Status Registry::AttachDirect(const std::string& group, int rank, Epoch epoch) {
  return groups_.SetDirect(group, rank, epoch);
}

absl::StatusOr<bool> Registry::CheckWriter(SequenceId sequence, int rank, Epoch epoch) const {
  HW_ASSIGN_OR_RETURN(const SequenceRegistry::Owner owner, sequences_.FindOwner(sequence));
  HW_RETURN_IF_ERROR(groups_.CheckRank(owner.group, rank, epoch));
  return groups_.IsDirect(owner.group, rank);
}

void Registry::CollectEnded() {
  for (const SequenceRegistry::Ended& ended : sequences_.TakeEnded()) {
    retiring_[ended.id] = {ended.group, ended.num_ranks, clock_.Now() + options_.rank_lease};
  }
}

// A rank that has heard of the end (the id came back as unknown) no longer lists
// the sequence: it has stopped writing.
void Registry::StopWriters(const std::string& group, int rank,
                           const google::protobuf::RepeatedField<uint64_t>& still_listed) {
  MutexLock lock(&mutex_);
  CollectEnded();
  for (const auto& [id, retiring] : retiring_) {
    const bool listed =
        std::find(still_listed.begin(), still_listed.end(), id) != still_listed.end();
    if (retiring.group == group && !listed) store_.StopWriter(id, rank);
  }
}

// A sequence that has not ended was found to be the group's when its report was
// taken; of one that has, only its own group may say that nobody writes any more.
bool Registry::IsWriterOf(const std::string& group, SequenceId sequence) {
  MutexLock lock(&mutex_);
  CollectEnded();
  const auto found = retiring_.find(sequence);
  return found == retiring_.end() || found->second.group == group;
}

std::vector<SequenceId> Registry::Tick() {
  groups_.Tick();
  std::vector<SequenceId> expired = sequences_.Tick();
  MutexLock lock(&mutex_);
  CollectEnded();
  // A rank hears of the end within one lease, or has lost its own and stopped.
  for (auto item = retiring_.begin(); item != retiring_.end();) {
    if (item->second.deadline > clock_.Now()) {
      ++item;
      continue;
    }
    for (int rank = 0; rank < item->second.num_ranks; ++rank) store_.StopWriter(item->first, rank);
    item = retiring_.erase(item);
  }
  return expired;
}

}  // namespace heavywater
