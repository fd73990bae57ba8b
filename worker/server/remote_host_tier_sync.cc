// The thread of the remote host tier that talks to the cache service.
#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/logging.h"
#include "worker/server/registered_memory.h"
#include "worker/server/remote_host_tier.h"

namespace heavywater {
namespace {

constexpr absl::Duration kPoll = absl::Milliseconds(20);  // rows wait so long to go together
constexpr absl::Duration kIdlePoll = absl::Milliseconds(500);
constexpr absl::Duration kRetry = absl::Milliseconds(300);
// Rows of a closed sequence that cannot be handed over are given up after this.
constexpr absl::Duration kGiveUp = absl::Seconds(60);
// At most so many pages' rows in one push, so that others get their turn.
constexpr int64_t kPushPages = 4;

}  // namespace

void RemoteHostTier::Run() {
  while (true) {
    std::vector<std::function<void()>> written;
    {
      MutexLock lock(&mutex_);
      written = EraseEnded();
    }
    for (const auto& done : written) done();
    {
      MutexLock lock(&mutex_);
      changed_.SignalAll();
      const bool busy = std::any_of(entries_.begin(), entries_.end(), [](const auto& named) {
        return named.second.sequence != nullptr;
      });
      if (!stopping_) work_.WaitWithTimeout(&mutex_, busy ? kPoll : kIdlePoll);
      if (stopping_) return;
    }
    AttachAgain();
    for (SequenceId sequence : OpenEntries()) Sync(sequence);
  }
}

absl::StatusOr<std::shared_ptr<SlabView>> RemoteHostTier::MapSlab(
    const v1::AttachResponse& attached) const {
  HW_ASSIGN_OR_RETURN(auto slab, SlabView::Map(attached.slab_name(), attached.slab_bytes(),
                                               attached.slab_nonce(), attached.format_version()));
  return RegisterSlab(std::move(slab), options_.backend);
}

// After every new epoch: a restarted service has another slab.
void RemoteHostTier::AttachAgain() {
  const Epoch epoch = link_.epoch();
  {
    MutexLock lock(&mutex_);
    if (epoch == attached_epoch_ || epoch == 0) return;
  }
  const auto attached = client_.Attach();
  if (!attached.ok()) {
    LogWarn("attaching to the page store failed", {{"error", attached.status().ToString()}});
    return;
  }
  {
    MutexLock lock(&mutex_);
    if (slab_ != nullptr && attached->slab_nonce() == slab_nonce_) {  // the same one
      attached_epoch_ = epoch;
      return;
    }
  }
  std::shared_ptr<SlabView> slab;
  if (!options_.disable_slab && !attached->slab_name().empty()) {
    auto mapped = MapSlab(*attached);
    if (mapped.ok()) {
      slab = *std::move(mapped);
    } else {
      LogInfo("the slab cannot be mapped; pages are streamed",
              {{"reason", mapped.status().ToString()}});
    }
  }
  MutexLock lock(&mutex_);
  attached_epoch_ = epoch;
  for (auto& [id, entry] : entries_) {
    if (entry.sequence == nullptr || entry.sequence->slab() == nullptr) continue;
    // Its pages lie in a slab that nobody reads any more.
    if (entry.sequence->granted_pages() > 0) MakeOrphan(entry, "its slab is gone");
    if (entry.sequence->granted_pages() == 0) entry.sequence->set_slab(slab);
  }
  slab_ = std::move(slab);
  slab_nonce_ = attached->slab_nonce();
}

std::vector<SequenceId> RemoteHostTier::OpenEntries() {
  MutexLock lock(&mutex_);
  std::vector<SequenceId> open;
  for (const auto& [id, entry] : entries_) {
    if (entry.sequence != nullptr && !entry.orphan) open.push_back(id);
  }
  return open;
}

int64_t RemoteHostTier::TargetPages(const Entry& entry) const {
  const RemoteSequence& sequence = *entry.sequence;
  const PageGeometry& geometry = sequence.geometry();
  // One page more than the rank will ask for, so that its page is always there.
  const int64_t ahead = geometry.PagesFor(
      std::min(entry.max_tokens,
               sequence.published() + options_.reserve_ahead_tokens + geometry.page_tokens));
  return std::max({entry.wanted_pages, sequence.num_pages(), entry.closing() ? 0 : ahead});
}

bool RemoteHostTier::HasWork(const Entry& entry) const {
  if (entry.sequence == nullptr || entry.orphan || absl::Now() < entry.next_try) return false;
  const RemoteSequence& sequence = *entry.sequence;
  const bool moves = sequence.slab() == nullptr || sequence.has_local_pages();
  return sequence.NextGrant(TargetPages(entry)).count > 0 ||
         (moves && sequence.CommitEnd() > sequence.committed());
}

void RemoteHostTier::Sync(SequenceId sequence) {
  MutexLock lock(&mutex_);
  Entry& entry = entries_.at(sequence);
  SyncRest(entry);
  if (absl::Now() < entry.next_try) return;
  Grant(entry);
  if (!entry.orphan && entry.sequence->CommitEnd() > entry.sequence->committed()) Push(entry);
  changed_.SignalAll();
}

void RemoteHostTier::Grant(Entry& entry) {
  const int64_t target = TargetPages(entry);
  absl::Status status = GrantUpTo(entry, target);
  // What is only ahead must not stand in the way of what is needed.
  if (absl::IsResourceExhausted(status) && entry.wanted_pages < target) {
    status = GrantUpTo(entry, entry.wanted_pages);
    if (status.ok()) entry.next_try = absl::Now() + kRetry;
  }
  if (!status.ok()) NoteFailure(entry, status);
}

absl::Status RemoteHostTier::GrantUpTo(Entry& entry, int64_t end_page) {
  RemoteSequence& sequence = *entry.sequence;
  while (true) {
    const RemoteSequence::PageSpan span = sequence.NextGrant(end_page);
    if (span.count == 0) return absl::OkStatus();
    if (span.skipped) {
      mutex_.Unlock();
      const absl::Status skipped = client_.Skip(sequence.id(), span.first, span.count);
      mutex_.Lock();
      HW_RETURN_IF_ERROR(skipped);
      sequence.AddSkip(span);
      continue;
    }
    mutex_.Unlock();
    const auto granted = client_.Reserve(sequence.id(), sequence.heads(), span.first, span.count);
    mutex_.Lock();
    HW_RETURN_IF_ERROR(granted.status());
    // A restarted service's places lie in a slab that is not mapped yet: asked for
    // again once it is.
    if (link_.epoch() != attached_epoch_) return absl::OkStatus();
    const std::vector<int64_t> offsets(granted->offsets().begin(), granted->offsets().end());
    HW_RETURN_IF_ERROR(sequence.AddGrant(span, offsets, granted->watermark_offset()));
    changed_.SignalAll();
  }
}

void RemoteHostTier::Push(Entry& entry) {
  RemoteSequence& sequence = *entry.sequence;
  const int64_t begin = sequence.committed();
  const int64_t end =
      std::min(sequence.CommitEnd(), begin + kPushPages * sequence.geometry().page_tokens);
  const LocalRows local = sequence.RowsToMove(begin, end);
  const bool streams = sequence.slab() == nullptr;
  if (MayNotWrite(entry)) return;
  entry.copying = true;
  mutex_.Unlock();
  absl::Status status;
  if (streams) {
    status = client_.Write(sequence.id(), sequence.geometry().row_bytes, local.rows);
    if (status.ok()) status = client_.Commit(sequence.id(), end);
  } else {
    local.CopyToSlab();
  }
  mutex_.Lock();
  entry.copying = false;
  if (MayNotWrite(entry)) {
    StopListing(entry);
  } else if (status.ok()) {
    sequence.Committed(end);
  } else {
    NoteFailure(entry, status);
  }
}

void RemoteHostTier::NoteFailure(Entry& entry, const absl::Status& status) {
  entry.refused = status;
  entry.next_try = absl::Now() + kRetry;
  // All else may pass: an outage, a full tier, a stale epoch (the link joins anew).
  if (absl::IsNotFound(status) || absl::IsFailedPrecondition(status) ||
      absl::IsInvalidArgument(status) || absl::IsDataLoss(status)) {
    MakeOrphan(entry, status.ToString());
  }
}

void RemoteHostTier::NoteUnknown(SequenceId sequence) {
  MutexLock lock(&mutex_);
  const auto found = entries_.find(sequence);
  if (found == entries_.end() || found->second.sequence == nullptr) {
    link_.ForgetSequence(sequence);  // nobody here writes to it
    return;
  }
  Entry& entry = found->second;
  entry.unknown = true;
  MakeOrphan(entry, "the service has ended it");
  StopListing(entry);
}

void RemoteHostTier::MakeOrphan(Entry& entry, const std::string& why) {
  if (entry.orphan) return;
  entry.orphan = true;
  StopListing(entry);
  LogWarn("pages of a sequence are no longer kept",
          {{"sequence", entry.sequence->id()}, {"reason", why}});
}

// Left out of a heartbeat, its pages may be given to others: not while the step
// or this thread still writes to addresses that it got before.
void RemoteHostTier::StopListing(Entry& entry) {
  if (!entry.orphan || entry.writing || entry.copying) return;
  if (entry.unknown) link_.ForgetSequence(entry.sequence->id());
  if (entry.listed && !entry.unknown) link_.RemoveSequence(entry.sequence->id());
  entry.listed = false;
}

bool RemoteHostTier::HasEnded(const Entry& entry) const {
  if (!entry.closing()) return false;
  const RemoteSequence& sequence = *entry.sequence;
  return entry.orphan || sequence.committed() >= sequence.published() ||
         absl::Now() > entry.closed + kGiveUp;
}

std::vector<std::function<void()>> RemoteHostTier::EraseEnded() {
  std::vector<std::function<void()>> written;
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    if (!HasEnded(entry->second)) {
      ++entry;
      continue;
    }
    if (entry->second.listed) link_.RemoveSequence(entry->first);
    if (entry->second.when_written) written.push_back(std::move(entry->second.when_written));
    entry = entries_.erase(entry);
  }
  return written;
}

}  // namespace heavywater
