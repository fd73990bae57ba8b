// What a cache service does all the time beside the others: keep its place, look at what
// changes, and, as the leader, clean up after those that are lost.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/base/version.h"
#include "cache_service/cluster/cluster.h"
#include "cache_service/runtime/logging.h"

namespace heavywater {
namespace {

constexpr absl::Duration kMaxBeat = absl::Seconds(1);
constexpr absl::Duration kCleanUpEvery = absl::Seconds(5);
// Clocks of services differ; and what ran when its service was lost is kept for this long, so
// that who asks for it hears that it was lost.
constexpr absl::Duration kClockMargin = absl::Seconds(5);
constexpr absl::Duration kLostFor = absl::Minutes(1);

}  // namespace

bool Cluster::stopping() const {
  MutexLock lock(&mutex_);
  return stopping_;
}

bool Cluster::Sleep(absl::Duration duration) {
  MutexLock lock(&mutex_);
  if (!stopping_) stop_.WaitWithTimeout(&mutex_, duration);
  return !stopping_;
}

void Cluster::Beat() {
  const absl::Duration interval = std::min(options_.lease / 3, kMaxBeat);
  bool was_up = true;
  do {
    absl::Status beat = BeatOnce();
    // The lease has ended: once more, with another.
    if (absl::IsNotFound(beat)) beat = BeatOnce();
    if (beat.ok() != was_up) {
      was_up = beat.ok();
      if (was_up) LogInfo("etcd is heard of again");
      if (!was_up) LogWarn("etcd is away: serving goes on", {{"reason", beat.ToString()}});
    }
    MutexLock lock(&mutex_);
    stats_.etcd_up = beat.ok();
    if (!beat.ok()) stats_.leader = false;
  } while (Sleep(interval));
}

v1::ServiceRecord Cluster::OwnRecord() const {
  v1::ServiceRecord record;
  record.set_service(options_.service);
  record.set_address(address_);
  record.set_version(kVersion);
  for (const v1::GroupRecord& group : registry_->groups().Records()) *record.add_groups() = group;
  return record;
}

absl::Status Cluster::NewLease() {
  HW_ASSIGN_OR_RETURN(const auto lease, etcd_->Grant(options_.lease));
  registered_.clear();
  const int before = slot_;
  HW_ASSIGN_OR_RETURN(const int slot, directory_.ClaimSlot(kMaxCacheServices, lease));
  lease_ = lease;  // not before: who has one has a slot
  if (slot != before) {
    LogWarn("its slot of sequence ids is another one: a restart uses it",
            {{"uses", before}, {"slot", slot}});
  }
  return absl::OkStatus();
}

absl::Status Cluster::BeatOnce() {
  if (lease_ == 0) {
    HW_RETURN_IF_ERROR(NewLease());
  } else if (const absl::Status renewed = etcd_->Renew(lease_); !renewed.ok()) {
    if (absl::IsNotFound(renewed)) lease_ = 0;
    return renewed;
  }
  const v1::ServiceRecord record = OwnRecord();
  const std::string bytes = record.SerializeAsString();
  if (bytes != registered_) {
    HW_RETURN_IF_ERROR(directory_.Register(record, lease_));
    registered_ = bytes;
  }
  HW_ASSIGN_OR_RETURN(const bool leads, directory_.Lead(lease_));
  {
    MutexLock lock(&mutex_);
    if (leads && !stats_.leader) LogInfo("leads the cache services", {{"prefix", options_.prefix}});
    stats_.leader = leads;
  }
  if (!leads || absl::Now() < next_clean_up_) return absl::OkStatus();
  next_clean_up_ = absl::Now() + kCleanUpEvery;
  return CleanUp();
}

bool Cluster::IsOver(const v1::SequenceRecord& record, absl::Time now) const {
  int64_t end_ms = record.expires_ms();
  if (end_ms == 0) end_ms = record.copy().expires_ms();
  if (end_ms > 0) return now > absl::FromUnixMillis(end_ms) + kClockMargin;
  const absl::Time missing = members_.MissingSince(record.owner());
  return Clock::Real().Now() > missing + kLostFor;
}

absl::Status Cluster::CleanUp() {
  HW_ASSIGN_OR_RETURN(const auto sequences, directory_.ListSequences());
  std::set<SequenceId> lost;
  for (const auto& [id, held] : sequences) {
    if (held.record.owner() == options_.service) continue;
    if (members_.Of(held.record.owner()) != Members::Presence::kGone) continue;
    if (!held.record.has_copy()) {
      lost.insert(id);
      if (!lost_.contains(id)) {
        LogWarn("sequence lost with its cache service: there is no copy of its pages",
                {{"sequence", id},
                 {"was_at", held.record.address()},
                 {"group", held.record.group()},
                 {"tenant", held.record.tenant()}});
        MutexLock lock(&mutex_);
        ++stats_.lost;
      }
    }
    if (IsOver(held.record, absl::Now())) CleanUpOne(id, held);
  }
  lost_ = std::move(lost);
  return absl::OkStatus();
}

void Cluster::CleanUpOne(SequenceId id, const HeldRecord& held) {
  const absl::StatusOr<bool> removed = directory_.Remove(id, held.revision);
  if (!removed.ok() || !*removed) return;  // it was taken over, or the next time
  if (copier_ != nullptr && held.record.has_copy()) {
    (void)copier_->Erase(held.record.copy().id());  // or it goes by its time
  }
  LogInfo("removed what a lost cache service had left of a sequence",
          {{"sequence", id}, {"was_at", held.record.address()}});
  MutexLock lock(&mutex_);
  ++stats_.cleaned;
}

void Cluster::WatchAll() {
  do {
    const absl::Status ended = WatchOnce();
    members_.LoseSight();
    if (!absl::IsUnavailable(ended) && !stopping()) {
      LogWarn("what etcd tells is read anew", {{"reason", ended.ToString()}});
    }
  } while (Sleep(absl::Milliseconds(500)));
}

absl::Status Cluster::WatchOnce() {
  HW_ASSIGN_OR_RETURN(const Directory::Snapshot snapshot, directory_.List());
  HW_ASSIGN_OR_RETURN(std::shared_ptr<EtcdWatch> watch, directory_.Watch(snapshot.revision + 1));
  {
    MutexLock lock(&mutex_);
    if (stopping_) return absl::CancelledError("it stops");
    watch_ = watch;
  }
  members_.Reset(snapshot.services);
  // What happened while nobody looked.
  std::set<SequenceId> own(snapshot.own_sequences.begin(), snapshot.own_sequences.end());
  for (const SequenceId id : registry_->sequences().Ids()) {
    if (own.erase(id) == 0) publisher_->LookAgain(id);
  }
  for (const SequenceId id : own) publisher_->LookAgain(id);
  while (true) {
    const absl::StatusOr<std::vector<EtcdEvent>> events = watch->Next();
    HW_RETURN_IF_ERROR(events.status());
    for (const EtcdEvent& event : *events) Apply(event);
  }
}

void Cluster::Apply(const EtcdEvent& event) {
  const Directory::Change change = directory_.Parse(event);
  if (change.service.has_value()) {
    if (event.deleted) {
      members_.Remove(*change.service);
    } else {
      members_.Put(*change.service, change.service_record);
    }
  }
  if (!change.sequence.has_value() || change.sequence_record.owner() == options_.service) return;
  // Another has it now, or it was removed.
  const auto local = registry_->sequences().Export(*change.sequence, /*with_state=*/false);
  if (local.has_value()) publisher_->LookAgain(*change.sequence);
}

}  // namespace heavywater
