#include "cache_service/cluster/publisher.h"

#include <google/protobuf/util/message_differencer.h>

#include <algorithm>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"

namespace heavywater {
namespace {

using google::protobuf::util::MessageDifferencer;

constexpr absl::Duration kRetry = absl::Seconds(1);
constexpr absl::Duration kRetryWhenFull = absl::Seconds(30);
constexpr absl::Duration kPoll = absl::Milliseconds(500);
constexpr absl::Duration kMargin = absl::Minutes(10);

// A copy's name is never used twice.
std::string NewCopyName(const std::string& service, SequenceId id, uint64_t count) {
  std::random_device random;
  return absl::StrCat(service, "-", id, "-", count, absl::StrFormat("-%08x", random()));
}

}  // namespace

Publisher::Publisher(const PublisherOptions& options, Directory& directory, SequenceCopier* copier,
                     SequenceRegistry& sequences, ChangeQueue& changes, Clock& clock)
    : options_(options),
      directory_(directory),
      copier_(copier),
      sequences_(sequences),
      changes_(changes),
      clock_(clock),
      thread_([this] { Run(); }) {}

void Publisher::Stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
  }
  if (thread_.joinable()) thread_.join();
}

void Publisher::Run() {
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (stopping_) return;
    }
    const std::optional<SequenceId> id = changes_.Take(kPoll);
    if (!id.has_value()) continue;
    const absl::Status done = Reconcile(*id);
    if (!done.ok()) {
      changes_.AddLater(*id, absl::IsResourceExhausted(done) ? kRetryWhenFull : kRetry);
    }
    changes_.Done();
  }
}

bool Publisher::BeginMove(SequenceId id) {
  MutexLock lock(&mutex_);
  return moving_.insert(id).second;
}

void Publisher::EndMove(SequenceId id) {
  {
    MutexLock lock(&mutex_);
    moving_.erase(id);
  }
  changes_.Add(id);
}

void Publisher::LookAgain(SequenceId id) {
  {
    MutexLock lock(&mutex_);
    stale_.insert(id);
  }
  changes_.Add(id);
}

void Publisher::Flush(absl::Duration limit) {
  const absl::Time deadline = absl::Now() + limit;
  while (changes_.size() > 0 && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(10));
}

Publisher::Stats Publisher::stats() const {
  MutexLock lock(&mutex_);
  return stats_;
}

void Publisher::Forget(SequenceId id) {
  const auto known = known_.find(id);
  if (known == known_.end()) return;
  const v1::CopyRecord& copy = known->second.record.copy();
  {
    MutexLock lock(&mutex_);
    stats_.copies -= copy.id().empty() ? 0 : 1;
    stats_.copy_bytes -= copy.bytes();
  }
  known_.erase(known);
}

void Publisher::Note(SequenceId id, const HeldRecord& held) {
  Forget(id);
  const v1::CopyRecord& copy = held.record.copy();
  known_[id] = held;
  MutexLock lock(&mutex_);
  stats_.copies += copy.id().empty() ? 0 : 1;
  stats_.copy_bytes += copy.bytes();
}

absl::Status Publisher::Reconcile(SequenceId id) {
  bool stale = false;
  {
    MutexLock lock(&mutex_);
    if (moving_.contains(id)) return absl::OkStatus();  // EndMove() brings it back
    stale = stale_.erase(id) > 0;
  }
  if (stale) Forget(id);
  if (!known_.contains(id)) {
    HW_ASSIGN_OR_RETURN(const std::optional<HeldRecord> found, directory_.Find(id));
    if (found.has_value() && found->record.owner() == directory_.service()) Note(id, *found);
    if (found.has_value() && found->record.owner() != directory_.service()) {
      GiveUp(id, found->record);
      return absl::OkStatus();
    }
  }
  const auto local = sequences_.Export(id, /*with_state=*/false);
  return local.has_value() ? Publish(id, *local) : Retract(id);
}

v1::SequenceRecord Publisher::RecordOf(const SequenceRegistry::Exported& local) const {
  v1::SequenceRecord record;
  record.set_owner(directory_.service());
  record.set_address(options_.address);
  record.set_tenant(local.tenant);
  record.set_group(local.group);
  record.set_request_id(local.request_id);
  record.set_suspended(local.suspended);
  record.set_finished(local.finished);
  if (local.suspended || local.finished) {
    const absl::Duration left = local.lease_end - clock_.Now();
    // Rounded, so that a look at it alone is no change.
    record.set_expires_ms(absl::ToUnixSeconds(absl::Now() + left + absl::Seconds(1)) * 1000);
  }
  return record;
}

bool Publisher::WantsCopy(const SequenceRegistry::Exported& local,
                          const v1::SequenceRecord& record) const {
  if (copier_ == nullptr || !local.finished || !local.can_go_on) return false;
  if (!options_.copies_finished && !(options_.copies_suspended && local.suspended)) return false;
  const v1::CopyRecord& copy = record.copy();
  return !record.has_copy() || copy.incarnation() != local.incarnation ||
         copy.num_tokens() != local.num_tokens || copy.expires_ms() < record.expires_ms();
}

absl::Status Publisher::AddCopy(SequenceId id, v1::SequenceRecord* record) {
  const std::string name = NewCopyName(directory_.service(), id, ++num_copies_);
  const absl::Duration left = absl::FromUnixMillis(record->expires_ms()) - absl::Now();
  const auto copy = copier_->CopyOut(id, name, options_.max_copy_bytes - stats().copy_bytes,
                                     std::max(left, options_.copy_ttl) + kMargin);
  {
    MutexLock lock(&mutex_);
    ++(copy.ok() ? stats_.copied : stats_.copies_failed);
  }
  if (copy.ok()) {
    *record->mutable_copy() = *copy;
    return absl::OkStatus();
  }
  (void)copier_->Erase(name);  // or it goes by its time
  if (absl::IsUnavailable(copy.status()) || absl::IsAborted(copy.status()) ||
      absl::IsResourceExhausted(copy.status())) {
    return copy.status();
  }
  // Trying again would not help.
  LogWarn("a sequence has no copy: it is lost if this service is",
          {{"sequence", id}, {"reason", copy.status().ToString()}});
  return absl::OkStatus();
}

absl::Status Publisher::Publish(SequenceId id, const SequenceRegistry::Exported& local) {
  const auto found = known_.find(id);
  const HeldRecord known = found == known_.end() ? HeldRecord() : found->second;
  v1::SequenceRecord record = RecordOf(local);
  // The last copy stays until another takes its place: it is what is left of a turn that runs.
  if (known.record.has_copy()) *record.mutable_copy() = known.record.copy();
  // First that it is there at all.
  if (known.revision == 0) HW_RETURN_IF_ERROR(Put(id, known, record));
  absl::Status copied;
  if (WantsCopy(local, record)) copied = AddCopy(id, &record);
  const auto held = known_.find(id);
  if (held == known_.end()) return absl::OkStatus();  // given up
  const HeldRecord before = held->second;
  if (!MessageDifferencer::Equals(before.record, record)) {
    const absl::Status put = Put(id, before, record);
    const bool new_copy = record.copy().id() != before.record.copy().id();
    const bool taken = put.ok() && known_.contains(id);
    // Without an answer the record may name either: none of them goes.
    const bool unknown = absl::IsUnavailable(put) || absl::IsDeadlineExceeded(put);
    if (new_copy && !unknown) EraseCopy(taken ? before.record : record);
    HW_RETURN_IF_ERROR(put);
  }
  return copied;
}

absl::Status Publisher::Put(SequenceId id, const HeldRecord& known,
                            const v1::SequenceRecord& record) {
  HW_ASSIGN_OR_RETURN(const std::optional<int64_t> revision,
                      directory_.Put(id, record, known.revision));
  if (revision.has_value()) {
    Note(id, {record, *revision});
    return absl::OkStatus();
  }
  // Somebody has changed it: an earlier try of ours whose answer was lost, or another service.
  HW_ASSIGN_OR_RETURN(const std::optional<HeldRecord> now, directory_.Find(id));
  if (!now.has_value()) {
    Forget(id);
    return absl::AbortedError("its record is gone");
  }
  if (now->record.owner() != directory_.service()) {
    GiveUp(id, now->record);
    return absl::OkStatus();
  }
  Note(id, *now);
  if (MessageDifferencer::Equals(now->record, record)) return absl::OkStatus();
  return absl::AbortedError("its record has changed");
}

absl::Status Publisher::Retract(SequenceId id) {
  const auto known = known_.find(id);
  if (known == known_.end()) return absl::OkStatus();
  const HeldRecord held = known->second;
  HW_ASSIGN_OR_RETURN(const bool removed, directory_.Remove(id, held.revision));
  Forget(id);
  // Otherwise it has changed: the next look says whose it is.
  if (!removed) return absl::AbortedError("its record has changed");
  EraseCopy(held.record);
  return absl::OkStatus();
}

void Publisher::EraseCopy(const v1::SequenceRecord& record) {
  if (copier_ == nullptr || !record.has_copy()) return;
  const absl::Status erased = copier_->Erase(record.copy().id());
  if (!erased.ok()) {
    LogWarn("a copy is left to its time",
            {{"copy", record.copy().id()}, {"reason", erased.ToString()}});
  }
}

void Publisher::GiveUp(SequenceId id, const v1::SequenceRecord& now) {
  Forget(id);
  const auto local = sequences_.Export(id, /*with_state=*/false);
  if (!local.has_value()) return;
  if (local->request_id != now.request_id()) {
    LogError("another cache service has a sequence of the same id: this one is not told to others",
             {{"sequence", id}, {"other", now.address()}});
    return;
  }
  LogWarn("another cache service has taken a sequence over: it ends here",
          {{"sequence", id}, {"by", now.address()}});
  sequences_.GiveUp(id);
  MutexLock lock(&mutex_);
  ++stats_.given_up;
}

}  // namespace heavywater
