#include "cache_service/registry/group_registry.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/layout.h"
#include "cache_service/registry/validate.h"

namespace heavywater {
namespace {

absl::Status CheckJoin(const v1::JoinRequest& request) {
  HW_RETURN_IF_ERROR(CheckText("group", request.group(), 1, kMaxNameBytes));
  HW_RETURN_IF_ERROR(CheckInt("size", request.size(), 1, kMaxRanks));
  HW_RETURN_IF_ERROR(CheckInt("rank", request.rank(), 0, request.size() - 1));
  HW_RETURN_IF_ERROR(CheckText("instance", request.instance(), 1, kMaxNameBytes));
  HW_RETURN_IF_ERROR(CheckText("config_digest", request.config_digest(), 0, kMaxDigestBytes));
  HW_RETURN_IF_ERROR(
      CheckText("advertised_address", request.advertised_address(), 0, kMaxNameBytes));
  HW_RETURN_IF_ERROR(CheckInt("timeout_ms", request.timeout_ms(), 0, kMaxJoinTimeoutMs));
  return GeometryOf(request.fingerprint()).status();
}

absl::Status UnknownGroup(const std::string& name) {
  return absl::NotFoundError(absl::StrCat("group \"", name, "\" is unknown"));
}

void RunAll(DeferredCalls& deferred) {
  for (const auto& call : deferred) call();
}

}  // namespace

GroupRegistry::GroupRegistry(const RegistryOptions& options, Clock& clock, StateStore* state)
    : options_(options), clock_(clock), state_(state), next_epoch_(options.first_epoch) {}

absl::Status GroupRegistry::Restore() {
  MutexLock lock(&mutex_);
  return state_->ForEach(
      StateKey(StateKind::kGroup),
      [this](std::string_view, std::string_view value)
          ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) -> absl::Status {
            v1::GroupState record;
            if (!record.ParseFromArray(value.data(), static_cast<int>(value.size()))) {
              return absl::DataLossError("the state of a group is damaged");
            }
            const std::string& name = record.name();
            Group& group = groups_.try_emplace(name, name, options_.rank_lease).first->second;
            HW_RETURN_IF_ERROR(group.Load(record, clock_.Now()));
            saved_[name] = group.revision();
            next_epoch_ = std::max(next_epoch_, group.epoch() + 1);
            return absl::OkStatus();
          });
}

void GroupRegistry::Save(const std::string& name) {
  if (state_ == nullptr) return;
  const auto group = groups_.find(name);
  StateBatch batch;
  if (group == groups_.end()) {
    if (saved_.erase(name) == 0) return;
    batch.Delete(StateKey(StateKind::kGroup, name));
  } else {
    int64_t& saved = saved_[name];
    if (saved == group->second.revision()) return;
    saved = group->second.revision();
    batch.Put(StateKey(StateKind::kGroup, name), group->second.ToRecord().SerializeAsString());
  }
  state_->Apply(batch);
}

absl::StatusOr<Group*> GroupRegistry::FindOrAdd(const std::string& name) {
  const auto found = groups_.find(name);
  if (found != groups_.end()) return &found->second;
  if (static_cast<int64_t>(groups_.size()) >= options_.max_groups) {
    return absl::ResourceExhaustedError(
        absl::StrCat("there are ", groups_.size(), " groups, the limit is ", options_.max_groups));
  }
  return &groups_.try_emplace(name, name, options_.rank_lease).first->second;
}

absl::StatusOr<Group*> GroupRegistry::FindLocked(const std::string& name) {
  HW_RETURN_IF_ERROR(CheckText("group", name, 0, kMaxNameBytes));
  const auto found = groups_.find(name);
  if (found == groups_.end()) return UnknownGroup(name);
  return &found->second;
}

absl::StatusOr<const Group*> GroupRegistry::FindLocked(const std::string& name) const {
  HW_RETURN_IF_ERROR(CheckText("group", name, 0, kMaxNameBytes));
  const auto found = groups_.find(name);
  if (found == groups_.end()) return UnknownGroup(name);
  return &found->second;
}

void GroupRegistry::Join(Ticket ticket, const v1::JoinRequest& request, JoinDone done) {
  const absl::Status valid = CheckJoin(request);
  if (!valid.ok()) {
    done(valid);
    return;
  }
  DeferredCalls deferred;
  {
    MutexLock lock(&mutex_);
    const absl::StatusOr<Group*> group = FindOrAdd(request.group());
    if (!group.ok()) {
      deferred.push_back([done, status = group.status()] { done(status); });
    } else if ((*group)->Join(ticket, request, clock_.Now(), next_epoch_, std::move(done),
                              deferred)) {
      ++next_epoch_;
    }
    Save(request.group());
  }
  RunAll(deferred);
}

void GroupRegistry::Wait(Ticket ticket, const v1::WaitRequest& request, WaitDone done) {
  absl::Status status = CheckText("key", request.key(), 1, kMaxKeyBytes);
  if (status.ok()) status = CheckInt("timeout_ms", request.timeout_ms(), 0, kMaxJoinTimeoutMs);
  DeferredCalls deferred;
  if (status.ok()) {
    MutexLock lock(&mutex_);
    const absl::StatusOr<Group*> group = FindLocked(request.group());
    status = group.ok() ? (*group)->CheckEpoch(request.epoch()) : group.status();
    if (status.ok()) {
      const int64_t timeout_ms =
          request.timeout_ms() == 0 ? kDefaultJoinTimeoutMs : request.timeout_ms();
      (*group)->board().Wait(ticket, request.key(), clock_.Now() + absl::Milliseconds(timeout_ms),
                             std::move(done), deferred);
    }
  }
  if (!status.ok()) {
    done(status);
    return;
  }
  RunAll(deferred);
}

void GroupRegistry::Cancel(Ticket ticket) {
  DeferredCalls deferred;
  {
    MutexLock lock(&mutex_);
    for (auto& [name, group] : groups_) group.Cancel(ticket, deferred);
  }
  RunAll(deferred);
}

absl::Status GroupRegistry::Put(const v1::PutRequest& request) {
  HW_RETURN_IF_ERROR(CheckText("key", request.key(), 1, kMaxKeyBytes));
  HW_RETURN_IF_ERROR(CheckText("value", request.value(), 0, kMaxValueBytes));
  DeferredCalls deferred;
  {
    MutexLock lock(&mutex_);
    HW_ASSIGN_OR_RETURN(Group* const group, FindLocked(request.group()));
    HW_RETURN_IF_ERROR(group->CheckEpoch(request.epoch()));
    HW_RETURN_IF_ERROR(group->board().Put(request.key(), request.value(), deferred));
    Save(request.group());
  }
  RunAll(deferred);
  return absl::OkStatus();
}

absl::Status GroupRegistry::Leave(const v1::LeaveRequest& request) {
  DeferredCalls deferred;
  {
    MutexLock lock(&mutex_);
    HW_ASSIGN_OR_RETURN(Group* const group, FindLocked(request.group()));
    HW_RETURN_IF_ERROR(group->Leave(request.rank(), request.epoch(), deferred));
    Save(request.group());
  }
  RunAll(deferred);
  return absl::OkStatus();
}

absl::Status GroupRegistry::Renew(const std::string& name, int rank, Epoch epoch) {
  MutexLock lock(&mutex_);
  HW_ASSIGN_OR_RETURN(Group* const group, FindLocked(name));
  return group->Renew(rank, epoch, clock_.Now());
}

absl::Status GroupRegistry::CheckRank(const std::string& name, int rank, Epoch epoch) const {
  MutexLock lock(&mutex_);
  HW_ASSIGN_OR_RETURN(const Group* const group, FindLocked(name));
  return group->CheckRank(rank, epoch);
}

absl::StatusOr<GroupRegistry::Formation> GroupRegistry::Find(const std::string& name,
                                                             Epoch epoch) const {
  MutexLock lock(&mutex_);
  HW_ASSIGN_OR_RETURN(const Group* const group, FindLocked(name));
  HW_RETURN_IF_ERROR(group->CheckEpoch(epoch));
  return Formation{group->size(), group->fingerprint()};
}

absl::Status GroupRegistry::SetDirect(const std::string& name, int rank, Epoch epoch) {
  MutexLock lock(&mutex_);
  HW_ASSIGN_OR_RETURN(Group* const group, FindLocked(name));
  HW_RETURN_IF_ERROR(group->CheckRank(rank, epoch));
  group->SetDirect(rank);
  Save(name);
  return absl::OkStatus();
}

Epoch GroupRegistry::MemberSince(const std::string& name, int rank) const {
  MutexLock lock(&mutex_);
  const auto group = groups_.find(name);
  return group == groups_.end() ? 0 : group->second.MemberSince(rank);
}

bool GroupRegistry::IsDirect(const std::string& name, int rank) const {
  MutexLock lock(&mutex_);
  const auto group = groups_.find(name);
  return group != groups_.end() && group->second.IsDirect(rank);
}

void GroupRegistry::Tick() {
  DeferredCalls deferred;
  {
    MutexLock lock(&mutex_);
    const absl::Time now = clock_.Now();
    for (auto group = groups_.begin(); group != groups_.end();) {
      const std::string name = group->first;
      group->second.Tick(now, deferred);
      group = group->second.empty() ? groups_.erase(group) : std::next(group);
      Save(name);
    }
  }
  RunAll(deferred);
}

void GroupRegistry::FailWaiting(const absl::Status& status) {
  DeferredCalls deferred;
  {
    MutexLock lock(&mutex_);
    for (auto& [name, group] : groups_) group.FailWaiting(status, deferred);
  }
  RunAll(deferred);
}

std::vector<v1::GroupRecord> GroupRegistry::Records() const {
  MutexLock lock(&mutex_);
  std::vector<v1::GroupRecord> records;
  for (const auto& [name, group] : groups_) {
    v1::GroupRecord& record = records.emplace_back();
    record.set_name(name);
    record.set_epoch(group.epoch());
    record.set_size(group.size());
  }
  return records;
}

int64_t GroupRegistry::num_groups() const {
  MutexLock lock(&mutex_);
  return static_cast<int64_t>(groups_.size());
}

int64_t GroupRegistry::num_ranks() const {
  MutexLock lock(&mutex_);
  int64_t ranks = 0;
  for (const auto& [name, group] : groups_) ranks += group.num_members();
  return ranks;
}

}  // namespace heavywater
