#include "cache_service/registry/registry.h"

#include <algorithm>
#include <limits>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/layout.h"

namespace heavywater {
namespace {

// Of a sequence that ended before a restart: no report is known to be of its end.
constexpr int32_t kUnknownIncarnation = -1;

// Whether K is stored rotated is each sequence's own; all else is as in its group.
absl::Status CompareWithGroup(const v1::Fingerprint& sequence, const std::string& what,
                              v1::Fingerprint group) {
  group.set_positions(sequence.positions());
  return CompareFingerprints(sequence, what, group, "the group has");
}

}  // namespace

Registry::Registry(const RegistryOptions& options, PageStore& store, Clock& clock,
                   StateStore* state)
    : options_(options),
      store_(store),
      clock_(clock),
      state_(state),
      groups_(options, clock, state),
      sequences_(options, store, clock, state),
      quotas_(store.tenants(), state),
      answers_(static_cast<uint64_t>(std::max(int64_t{0}, absl::ToUnixMicros(clock.Now())))) {
  store.tenants().SetDefaults(options.tenant_defaults);
}

absl::Status Registry::Restore(const std::vector<SequenceId>& live,
                               const std::vector<SequenceId>& retiring) {
  HW_RETURN_IF_ERROR(groups_.Restore());
  HW_RETURN_IF_ERROR(quotas_.Restore());
  HW_RETURN_IF_ERROR(sequences_.Restore(live));
  MutexLock lock(&mutex_);
  // Those first that were ended just now: they may be among the records below.
  CollectEnded();
  for (const SequenceRegistry::FinishedRank& rank : sequences_.FinishedRanks()) {
    late_stops_[{rank.id, rank.rank}] = {rank.incarnation, rank.write_end + options_.write_grace()};
  }
  for (const auto& [id, write_end] : sequences_.WriteEnds()) {
    contests_[id].end = write_end + options_.write_grace();
  }
  return LoadRetiring(retiring);
}

// How much of their leases is over is not known: they begin anew, which is only later.
absl::Status Registry::LoadRetiring(const std::vector<SequenceId>& retiring) {
  HW_RETURN_IF_ERROR(state_->ForEach(
      StateKey(StateKind::kRetiring),
      [this](std::string_view key, std::string_view value)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::Status {
            HW_ASSIGN_OR_RETURN(const StateId id, ParseStateKey(key));
            v1::RetiringState record;
            if (!record.ParseFromArray(value.data(), static_cast<int>(value.size())) ||
                record.num_ranks() < 1 || record.num_ranks() > kMaxRanks) {
              return absl::DataLossError(
                  absl::StrCat("the state of ended sequence ", id.id, " is damaged"));
            }
            retiring_[id.id] = {
                record.group(),
                record.epoch(),
                record.num_ranks(),
                clock_.Now() + absl::Milliseconds(record.lease_ms()) + options_.write_grace(),
                kUnknownIncarnation,
                answers_};
            return absl::OkStatus();
          }));
  for (const SequenceId id : retiring) {
    if (retiring_.contains(id)) continue;
    return absl::DataLossError(
        absl::StrCat("the state has pages of ended sequence ", id, ", but not its ranks"));
  }
  return absl::OkStatus();
}

absl::StatusOr<v1::OpenSequenceResponse> Registry::Open(const v1::OpenSequenceRequest& request) {
  HW_ASSIGN_OR_RETURN(const GroupRegistry::Formation formation,
                      groups_.Find(request.group(), request.epoch()));
  HW_RETURN_IF_ERROR(
      CompareWithGroup(request.fingerprint(), "the request has", formation.fingerprint));
  return sequences_.Open(request, formation.size, CanRead(request.group(), formation.size));
}

// Ranks take stored pages over in the slab.
bool Registry::CanRead(const std::string& group, int size) const {
  for (int rank = 0; rank < size; ++rank) {
    if (!groups_.IsDirect(group, rank)) return false;
  }
  return true;
}

absl::StatusOr<v1::ReopenSequenceResponse> Registry::Reopen(
    const v1::ReopenSequenceRequest& request, const std::function<bool()>& is_cancelled) {
  const auto find_formation = [&]() -> absl::StatusOr<GroupRegistry::Formation> {
    auto found = groups_.Find(request.group(), request.epoch());
    // A group whose ranks are about to join anew: NOT_FOUND would say that of the sequence.
    if (absl::IsNotFound(found.status())) return absl::AbortedError(found.status().message());
    return found;
  };
  HW_ASSIGN_OR_RETURN(const GroupRegistry::Formation formation, find_formation());
  HW_ASSIGN_OR_RETURN(
      const SequenceRegistry::Owner owner,
      sequences_.FindOwner(request.sequence_id(), Viewer::Tenant(request.tenant())));
  HW_RETURN_IF_ERROR(
      CompareWithGroup(owner.fingerprint, "the sequence has", formation.fingerprint));
  // Ranks read them in place. Waits for the tiers below, and reads all: so not under a lock.
  HW_RETURN_IF_ERROR(sequences_.BringUp(request.sequence_id()));
  HW_RETURN_IF_ERROR(store_.CheckPages(request.sequence_id()));
  // By then its caller may have given up, and asked again; or the group has formed anew.
  if (is_cancelled != nullptr && is_cancelled()) {
    return absl::CancelledError(
        absl::StrCat("whoever asked for sequence ", request.sequence_id(), " has gone"));
  }
  HW_RETURN_IF_ERROR(find_formation().status());
  return GoOn(request, MembersSince(request.group(), formation.size), owner.incarnation);
}

std::vector<Epoch> Registry::MembersSince(const std::string& group, int size) const {
  std::vector<Epoch> since;
  for (int rank = 0; rank < size; ++rank) since.push_back(groups_.MemberSince(group, rank));
  return since;
}

// That it may be contested is known before it is, so that nobody takes these contests for
// earlier ones, which are over; and also where it fails, when some ranks are contested.
absl::StatusOr<v1::ReopenSequenceResponse> Registry::GoOn(const v1::ReopenSequenceRequest& request,
                                                          const std::vector<Epoch>& since,
                                                          int32_t incarnation) {
  const SequenceId id = request.sequence_id();
  {
    MutexLock lock(&mutex_);
    ++contests_[id].reopens;
  }
  auto reopened = sequences_.Reopen(request, since, incarnation);
  while (absl::IsResourceExhausted(reopened.status())) {
    const absl::Status room = sequences_.MakeRoom(reopened.status(), /*spared=*/id);
    reopened = room.ok() ? sequences_.Reopen(request, since, incarnation) : room;
    if (!room.ok()) break;
  }
  // 0: its group has just gone, and comes back with whichever process.
  const bool unknown = std::count(since.begin(), since.end(), Epoch{0}) > 0;
  const Epoch latest =
      unknown ? std::numeric_limits<Epoch>::max() : *std::max_element(since.begin(), since.end());
  const absl::Time write_end =
      reopened.ok() ? sequences_.EarlierWriteEnd(id, latest) : sequences_.WriteEnd(id);
  const absl::Time end = write_end + options_.write_grace();
  MutexLock lock(&mutex_);
  const auto contest = contests_.find(id);
  contest->second.end = std::max(contest->second.end, end);
  --contest->second.reopens;
  EndContestIfOver(contest);
  return reopened;
}

// Processes that were replaced stop by their own clocks.
void Registry::EndContests() {
  for (auto contest = contests_.begin(); contest != contests_.end();) {
    contest = EndContestIfOver(contest);
  }
}

std::map<SequenceId, Registry::Contest>::iterator Registry::EndContestIfOver(
    std::map<SequenceId, Contest>::iterator contest) {
  if (contest->second.reopens > 0 || contest->second.end > clock_.Now()) return ++contest;
  store_.EndContest(contest->first);
  return contests_.erase(contest);
}

absl::StatusOr<v1::HeartbeatResponse> Registry::Heartbeat(const v1::HeartbeatRequest& request) {
  HW_RETURN_IF_ERROR(groups_.Renew(request.group(), request.rank(), request.epoch()));
  v1::HeartbeatResponse response;
  const absl::Status agreement = sequences_.Renew(request.group(), request.sequence_ids(),
                                                  response.mutable_unknown_sequence_ids());
  sequences_.AddSuspended(request.sequence_ids(), response.mutable_suspended_sequence_ids());
  response.set_number(StopWriters(request));
  const HostPressure pressure = store_.Pressure();
  response.set_host_shortage_bytes(pressure.shortage_bytes);
  response.set_host_restable_bytes(pressure.restable_bytes);
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
    if (report.finished()) NoteFinished(request, report);
  }
  HW_RETURN_IF_ERROR(status);
  return response;
}

absl::Status Registry::AttachDirect(const std::string& group, int rank, Epoch epoch) {
  return groups_.SetDirect(group, rank, epoch);
}

absl::StatusOr<bool> Registry::CheckWriter(SequenceId sequence, int rank, Epoch epoch) const {
  HW_ASSIGN_OR_RETURN(const SequenceRegistry::Owner owner, sequences_.FindOwner(sequence));
  const absl::Status member = groups_.CheckRank(owner.group, rank, epoch);
  // Its leases have ended, its ranks join anew: NOT_FOUND would say that of the sequence,
  // whose pages the rank would then give up.
  if (absl::IsNotFound(member)) return absl::AbortedError(member.message());
  HW_RETURN_IF_ERROR(member);
  if (owner.stopped) {
    return absl::NotFoundError(absl::StrCat("sequence ", sequence,
                                            " has not been heard of for as long as its lease: its "
                                            "ranks write to it again once it is reopened"));
  }
  return groups_.IsDirect(owner.group, rank);
}

absl::StatusOr<bool> Registry::AdmitWriter(SequenceId sequence, int rank, Epoch epoch) {
  HW_ASSIGN_OR_RETURN(const bool direct, CheckWriter(sequence, rank, epoch));
  sequences_.RenewOne(sequence);
  return direct;
}

// A rank that does not hear of the end stops by its own clock before the lease
// as it was given is over, even where the sequence ends earlier; a write that is
// under way then has the grace to end. (The whole argument:
// worker/server/remote_host_tier_fence.cc.)
void Registry::CollectEnded() {
  for (const SequenceRegistry::Ended& ended : sequences_.TakeEnded()) {
    retiring_[ended.id] = {
        ended.group,       ended.epoch,
        ended.num_ranks,   std::max(ended.write_end, clock_.Now()) + options_.write_grace(),
        ended.incarnation, answers_};
  }
}

// A rank that no longer lists the sequence has stopped writing. Not believed are
// another process of that rank, which joined later (the one that wrote may live
// on), and a heartbeat that was sent before the end: the rank may not have known the
// sequence then, and have come to write it meanwhile.
uint64_t Registry::StopWriters(const v1::HeartbeatRequest& request) {
  const Epoch since = groups_.MemberSince(request.group(), request.rank());
  const absl::flat_hash_set<SequenceId> listed(request.sequence_ids().begin(),
                                               request.sequence_ids().end());
  MutexLock lock(&mutex_);
  CollectEnded();
  for (auto& [id, retiring] : retiring_) {
    if (retiring.group != request.group() || retiring.epoch < since) continue;
    if (SentAfterEnd(request, retiring) && !listed.contains(id)) {
      store_.StopWriter(id, request.rank());
    }
  }
  return ++answers_;
}

// A heartbeat that was given up may still be under way when later ones have come. Who names an
// answer that was given after the end has sent its request after it.
bool Registry::SentAfterEnd(const v1::HeartbeatRequest& request, Retiring& retiring) const {
  if (request.has_answered_number()) {
    return request.answered_number() > retiring.answers && request.answered_number() <= answers_;
  }
  return ++retiring.heard[request.rank()] > 1;
}

// Of one that has ended only its own group may say that nobody writes any more, not of an
// earlier incarnation, since its ranks may have gone on, and not a process that joined later
// than it was opened: the one before may live on.
bool Registry::IsOfItsEnd(const v1::ReportPlanRequest& request, const v1::PlanReport& report) {
  const Epoch since = groups_.MemberSince(request.group(), request.rank());
  MutexLock lock(&mutex_);
  CollectEnded();
  const auto found = retiring_.find(report.sequence_id());
  return found != retiring_.end() && found->second.group == request.group() &&
         found->second.epoch >= since && found->second.incarnation == report.incarnation();
}

// A sequence that has not ended was found to be the group's when its report was taken.
void Registry::NoteFinished(const v1::ReportPlanRequest& request, const v1::PlanReport& report) {
  const SequenceId id = report.sequence_id();
  const int rank = request.rank();
  if (!sequences_.IsCurrent(id, report.incarnation())) {
    if (IsOfItsEnd(request, report)) store_.StopWriter(id, rank);
    return;
  }
  StopFinished(id, rank, report.incarnation(), groups_.MemberSince(request.group(), rank));
}

// Its reservation waited for room, and whoever asked has given up.
void Registry::StopIfFinished(SequenceId id, int rank) {
  const absl::StatusOr<SequenceRegistry::Owner> owner = sequences_.FindOwner(id);
  if (!owner.ok() || !sequences_.HasFinished(id, rank)) return;
  StopFinished(id, rank, owner->incarnation, groups_.MemberSince(owner->group, rank));
}

void Registry::StopFinished(SequenceId id, int rank, int32_t incarnation, Epoch since) {
  const absl::Time earlier = sequences_.EarlierWriteEnd(id, since);
  if (earlier + options_.write_grace() <= clock_.Now()) {
    store_.StopWriter(id, rank);
    return;
  }
  MutexLock lock(&mutex_);
  late_stops_[{id, rank}] = {incarnation, earlier + options_.write_grace()};
}

void Registry::StopLater() {
  for (auto stop = late_stops_.begin(); stop != late_stops_.end();) {
    const auto& [id, rank] = stop->first;
    if (!sequences_.IsCurrent(id, stop->second.incarnation)) {
      stop = late_stops_.erase(stop);
    } else if (stop->second.at <= clock_.Now()) {
      store_.StopWriter(id, rank);
      stop = late_stops_.erase(stop);
    } else {
      ++stop;
    }
  }
}

std::vector<SequenceId> Registry::Tick() {
  groups_.Tick();
  std::vector<SequenceId> expired = sequences_.Tick();
  MutexLock lock(&mutex_);
  CollectEnded();
  StopLater();
  EndContests();
  StateBatch ended;
  // By now every writer has heard of the end, or has stopped by its own clock.
  for (auto item = retiring_.begin(); item != retiring_.end();) {
    if (item->second.deadline > clock_.Now()) {
      ++item;
      continue;
    }
    // One that came back from another cache service has writers of its own.
    const bool is_back = sequences_.Export(item->first, /*with_state=*/false).has_value();
    for (int rank = 0; rank < item->second.num_ranks && !is_back; ++rank) {
      store_.StopWriter(item->first, rank);
    }
    ended.Delete(StateKey(StateKind::kRetiring, item->first));
    item = retiring_.erase(item);
  }
  if (state_ != nullptr && !ended.empty()) state_->Apply(ended);
  return expired;
}

}  // namespace heavywater
