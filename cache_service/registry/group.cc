#include "cache_service/registry/group.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/join_agreement.h"
#include "cache_service/registry/validate.h"

namespace heavywater {
namespace {

// Several heartbeats may be lost before a lease ends.
constexpr int kHeartbeatsPerLease = 5;
constexpr size_t kMaxReplaced = 256;

}  // namespace

void Group::Answer(JoinDone done, absl::StatusOr<v1::JoinResponse> result,
                   DeferredCalls& deferred) {
  deferred.push_back([done = std::move(done), result = std::move(result)] { done(result); });
}

v1::JoinResponse Group::Response() const {
  v1::JoinResponse response;
  response.set_epoch(epoch_);
  response.set_lease_ms(absl::ToInt64Milliseconds(lease_));
  response.set_heartbeat_interval_ms(
      std::max<int64_t>(1, absl::ToInt64Milliseconds(lease_ / kHeartbeatsPerLease)));
  for (const auto& [rank, member] : members_) response.add_addresses(member.address);
  return response;
}

bool Group::AnyIsLive(absl::Time now) const {
  return std::any_of(members_.begin(), members_.end(),
                     [&](const auto& item) { return item.second.lease_end > now; });
}

bool Group::Join(Ticket ticket, const v1::JoinRequest& request, absl::Time now, Epoch epoch,
                 JoinDone done, DeferredCalls& deferred) {
  if (std::find(replaced_.begin(), replaced_.end(), request.instance()) != replaced_.end()) {
    Answer(
        std::move(done),
        absl::FailedPreconditionError(absl::StrCat("rank ", request.rank(), " of group \"", name_,
                                                   "\" is another process by now, this one (\"",
                                                   request.instance(), "\") was replaced")),
        deferred);
    return false;
  }
  // A stray process must not end a group that works, nor one that forms again: while
  // members live, what they have in common is what the group's name stands for.
  if (const absl::Status agreement = AgreesWithMembers(request, now); !agreement.ok()) {
    Answer(std::move(done), agreement, deferred);
    return false;
  }
  if (formed_) {
    const auto member = members_.find(request.rank());
    const bool same = member != members_.end() && member->second.instance == request.instance();
    const bool gives_up = request.failed_epoch() != 0 && request.failed_epoch() == epoch_;
    if (same && !gives_up) {
      member->second.lease_end = now + lease_;
      Answer(std::move(done), Response(), deferred);  // a retry: the answer was lost
      return false;
    }
    Dissolve(same ? absl::StrCat("rank ", request.rank(), " has lost its peers")
                  : absl::StrCat("rank ", request.rank(), " joined anew"),
             deferred);
  }
  if (!joining_.empty()) {
    const absl::Status agreement = CheckAgreement(request, joining_.begin()->second.request);
    if (!agreement.ok()) {
      for (auto& [rank, joining] : joining_) Answer(std::move(joining.done), agreement, deferred);
      joining_.clear();
      Answer(std::move(done), agreement, deferred);
      return false;
    }
  }
  const auto earlier = joining_.find(request.rank());
  if (earlier != joining_.end()) {
    Answer(std::move(earlier->second.done),
           absl::AbortedError(absl::StrCat("rank ", request.rank(), " joined again as instance \"",
                                           request.instance(), "\"")),
           deferred);
    joining_.erase(earlier);
  }
  const int64_t timeout_ms =
      request.timeout_ms() == 0 ? kDefaultJoinTimeoutMs : request.timeout_ms();
  joining_.emplace(request.rank(),
                   Joining{ticket, request, now + absl::Milliseconds(timeout_ms), std::move(done)});
  if (static_cast<int>(joining_.size()) < request.size()) return false;
  Form(epoch, now, deferred);
  return true;
}

absl::Status Group::AgreesWithMembers(const v1::JoinRequest& request, absl::Time now) const {
  return AnyIsLive(now) ? CheckAgreement(request, common_) : absl::OkStatus();
}

void Group::Form(Epoch epoch, absl::Time now, DeferredCalls& deferred) {
  ++revision_;
  epoch_ = epoch;
  formed_ = true;
  common_ = joining_.begin()->second.request;
  std::map<int, Member> members;
  for (const auto& [rank, joining] : joining_) {
    const auto before = members_.find(rank);
    const bool same =
        before != members_.end() && before->second.instance == joining.request.instance();
    members[rank] = {joining.request.instance(), joining.request.advertised_address(), now + lease_,
                     same && before->second.direct, same ? before->second.since : epoch};
  }
  members_ = std::move(members);
  for (const auto& [rank, joining] : joining_) NoteInstance(rank, joining.request.instance());
  const v1::JoinResponse response = Response();
  for (auto& [rank, joining] : joining_) Answer(std::move(joining.done), response, deferred);
  joining_.clear();
}

// A process that stood still and was replaced must not take its place back when it wakes.
void Group::NoteInstance(int rank, const std::string& instance) {
  std::string& last = instances_[rank];
  if (!last.empty() && last != instance) replaced_.push_back(last);
  if (replaced_.size() > kMaxReplaced) replaced_.pop_front();
  last = instance;
}

void Group::Dissolve(const std::string& why, DeferredCalls& deferred) {
  if (!formed_) return;
  ++revision_;
  formed_ = false;
  dissolved_because_ = why;
  board_.Clear(CheckEpoch(epoch_), deferred);
}

absl::Status Group::CheckEpoch(Epoch epoch) const {
  if (!formed_) {
    return absl::AbortedError(
        absl::StrCat("group \"", name_, "\" has no current formation: ", dissolved_because_));
  }
  if (epoch == epoch_) return absl::OkStatus();
  return absl::AbortedError(
      absl::StrCat("epoch is ", epoch, ", group \"", name_, "\" is at ", epoch_));
}

absl::Status Group::CheckRank(int rank, Epoch epoch) const {
  HW_RETURN_IF_ERROR(CheckEpoch(epoch));
  return CheckInt("rank", rank, 0, size() - 1);
}

absl::Status Group::Renew(int rank, Epoch epoch, absl::Time now) {
  HW_RETURN_IF_ERROR(CheckRank(rank, epoch));
  members_[rank].lease_end = now + lease_;
  return absl::OkStatus();
}

absl::Status Group::Leave(int rank, Epoch epoch, DeferredCalls& deferred) {
  // Ranks leave one after another: the second finds the formation dissolved by
  // the first, and is a member of it nevertheless.
  if (epoch != epoch_) return CheckEpoch(epoch);
  HW_RETURN_IF_ERROR(CheckInt("rank", rank, 0, size() - 1));
  members_.erase(rank);
  ++revision_;
  Dissolve(absl::StrCat("rank ", rank, " left"), deferred);
  return absl::OkStatus();
}

std::string Group::MissingRanks() const {
  std::string missing;
  const int size = joining_.begin()->second.request.size();
  for (int rank = 0; rank < size; ++rank) {
    if (joining_.contains(rank)) continue;
    absl::StrAppend(&missing, missing.empty() ? "" : ", ", rank);
  }
  return absl::StrCat(missing, " of ", size);
}

// A member that waits in Join for the others sends no heartbeats: that it waits shows
// that it lives.
void Group::RenewWaiting(absl::Time now) {
  for (auto& [rank, member] : members_) {
    const auto joining = joining_.find(rank);
    if (joining != joining_.end() && joining->second.request.instance() == member.instance) {
      member.lease_end = now + lease_;
    }
  }
}

void Group::Tick(absl::Time now, DeferredCalls& deferred) {
  RenewWaiting(now);
  for (auto member = members_.begin(); member != members_.end();) {
    if (member->second.lease_end > now) {
      ++member;
      continue;
    }
    Dissolve(absl::StrCat("the lease of rank ", member->first, " ended"), deferred);
    member = members_.erase(member);
    ++revision_;
  }
  const std::string missing = joining_.empty() ? "" : MissingRanks();
  for (auto joining = joining_.begin(); joining != joining_.end();) {
    if (joining->second.deadline > now) {
      ++joining;
      continue;
    }
    Answer(std::move(joining->second.done),
           absl::DeadlineExceededError(
               absl::StrCat("group \"", name_, "\" is not complete: missing ranks ", missing)),
           deferred);
    joining = joining_.erase(joining);
  }
  board_.Expire(now, deferred);
}

void Group::Cancel(Ticket ticket, DeferredCalls& deferred) {
  for (auto joining = joining_.begin(); joining != joining_.end(); ++joining) {
    if (joining->second.ticket != ticket) continue;
    Answer(std::move(joining->second.done), absl::CancelledError("the caller gave up"), deferred);
    joining_.erase(joining);
    return;
  }
  board_.Cancel(ticket, deferred);
}

void Group::FailWaiting(const absl::Status& status, DeferredCalls& deferred) {
  for (auto& [rank, joining] : joining_) Answer(std::move(joining.done), status, deferred);
  joining_.clear();
  board_.Clear(status, deferred);
}

Epoch Group::MemberSince(int rank) const {
  const auto member = members_.find(rank);
  return member == members_.end() ? 0 : member->second.since;
}

void Group::SetDirect(int rank) {
  members_[rank].direct = true;
  ++revision_;
}

v1::GroupState Group::ToRecord() const {
  v1::GroupState record;
  record.set_name(name_);
  record.set_epoch(epoch_);
  record.set_formed(formed_);
  record.set_dissolved_because(dissolved_because_);
  *record.mutable_common() = common_;
  for (const auto& [rank, member] : members_) {
    v1::MemberState& state = *record.add_members();
    state.set_rank(rank);
    state.set_instance(member.instance);
    state.set_address(member.address);
    state.set_direct(member.direct);
    state.set_since(member.since);
  }
  record.mutable_instances()->insert(instances_.begin(), instances_.end());
  record.mutable_replaced()->Add(replaced_.begin(), replaced_.end());
  record.mutable_board()->insert(board_.values().begin(), board_.values().end());
  return record;
}

absl::Status Group::Load(const v1::GroupState& record, absl::Time now) {
  epoch_ = record.epoch();
  formed_ = record.formed();
  dissolved_because_ = record.dissolved_because();
  common_ = record.common();
  for (const v1::MemberState& state : record.members()) {
    members_[state.rank()] = {state.instance(), state.address(), now + lease_, state.direct(),
                              state.since()};
  }
  instances_.insert(record.instances().begin(), record.instances().end());
  replaced_.assign(record.replaced().begin(), record.replaced().end());
  DeferredCalls none;
  for (const auto& [key, value] : record.board()) {
    HW_RETURN_IF_ERROR(board_.Put(key, value, none));
  }
  if (!formed_ || static_cast<int>(members_.size()) == size()) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("the state of group \"", name_, "\" has ",
                                          members_.size(), " members of ", size()));
}

bool Group::IsDirect(int rank) const {
  const auto member = members_.find(rank);
  return member != members_.end() && member->second.direct;
}

}  // namespace heavywater
