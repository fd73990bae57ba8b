// What the thread of the host tier does, a call at a time.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "tests/sim/system/sim_host_tier.h"

namespace heavywater {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(2);
constexpr absl::Duration kRetry = absl::Milliseconds(300);
constexpr absl::Duration kGiveUp = absl::Seconds(10);
constexpr int64_t kPushPages = 4;

}  // namespace

void SimHostTier::AttachAgain() {
  v1::AttachRequest request;
  request.set_group(kSimGroup);
  request.set_rank(link_.options().rank);
  request.set_epoch(link_.epoch());
  const Epoch epoch = link_.epoch();
  world_.network.Call<v1::AttachResponse>(
      link_.caller(), kTimeout,
      [&service = service_, request] { return service.pages().Attach(request); },
      [this, epoch](const absl::StatusOr<v1::AttachResponse>& attached) {
        if (epoch != link_.epoch()) return;
        if (!attached.ok()) {
          world_.network.AfterIfAlive(link_.caller(), kRetry, [this, epoch] {
            if (epoch == link_.epoch()) AttachAgain();
          });
          return;
        }
        attached_epoch_ = epoch;
        if (attached->slab_name().empty() || attached->slab_nonce() == slab_nonce_) return;
        auto mapped = SlabView::Map(attached->slab_name(), attached->slab_bytes(),
                                    attached->slab_nonce(), attached->format_version());
        if (!mapped.ok()) return;
        slab_ = *std::move(mapped);
        slab_nonce_ = attached->slab_nonce();
      });
}

void SimHostTier::Poll() {
  if (dead_) return;
  EraseEnded();
  for (auto& [id, entry] : entries_) {
    if (entry.sequence != nullptr && !entry.orphan) Sync(entry);
  }
}

int64_t SimHostTier::TargetPages(const Entry& entry) const {
  const RemoteSequence& sequence = *entry.sequence;
  const PageGeometry& geometry = sequence.geometry();
  const int64_t ahead = geometry.PagesFor(std::min(
      entry.max_tokens, sequence.published() + reserve_ahead_tokens_ + geometry.page_tokens));
  return std::max({entry.wanted_pages, sequence.num_pages(), entry.closing() ? 0 : ahead});
}

void SimHostTier::Sync(Entry& entry) {
  if (entry.in_flight || world_.clock.Now() < entry.next_try) return;
  const RemoteSequence::PageSpan span = entry.sequence->NextGrant(TargetPages(entry));
  const bool pushes = entry.sequence->CommitEnd() > entry.sequence->committed();
  // What is only ahead must not stand in the way of what is there.
  if (span.count > 0 && (!pushes || world_.OneIn(2))) {
    span.skipped ? SendSkip(entry, span) : SendGrant(entry, span);
  } else if (pushes) {
    Push(entry);
  }
}

v1::ReserveRequest SimHostTier::ReserveRequestOf(const RemoteSequence& sequence,
                                                 RemoteSequence::PageSpan span) const {
  v1::ReserveRequest request;
  request.set_sequence_id(sequence.id());
  request.set_epoch(link_.epoch());
  request.set_rank(link_.options().rank);
  request.set_first_kv_head(sequence.heads().first);
  request.set_num_kv_heads(sequence.heads().count);
  request.set_first_page(span.first);
  request.set_num_pages(span.count);
  return request;
}

absl::Status SimHostTier::TakeGrant(Entry& entry, RemoteSequence::PageSpan span, Epoch epoch,
                                    absl::Time sent,
                                    const absl::StatusOr<v1::ReserveResponse>& granted) {
  HW_RETURN_IF_ERROR(granted.status());
  link_.NoteRenewed(entry.sequence->id(), sent);
  // Asked for again once it is attached.
  if (epoch != attached_epoch_ || link_.epoch() != attached_epoch_) return absl::OkStatus();
  const std::vector<int64_t> offsets(granted->offsets().begin(), granted->offsets().end());
  return entry.sequence->AddGrant(span, offsets, granted->watermark_offset());
}

// As the step waits for its thread.
absl::Status SimHostTier::ReserveNow(Entry& entry, int64_t end_page) {
  for (int i = 0; i < 4 && entry.sequence->num_pages() < end_page; ++i) {
    const RemoteSequence::PageSpan span = entry.sequence->NextGrant(end_page);
    if (span.count == 0) return absl::OkStatus();
    if (span.skipped) {
      v1::AbortRequest request;
      request.set_sequence_id(entry.sequence->id());
      request.set_epoch(link_.epoch());
      request.set_rank(link_.options().rank);
      request.set_first_page(span.first);
      request.set_num_pages(span.count);
      const auto skipped = world_.network.CallNow<v1::AbortResponse>(
          *link_.caller(), [&] { return service_.pages().Abort(request); });
      if (!skipped.ok()) NoteFailure(entry, skipped.status());
      HW_RETURN_IF_ERROR(skipped.status());
      entry.sequence->AddSkip(span);
      continue;
    }
    const v1::ReserveRequest request = ReserveRequestOf(*entry.sequence, span);
    const absl::Time sent = world_.clock.Now();
    const auto granted = world_.network.CallNow<v1::ReserveResponse>(
        *link_.caller(), [&] { return service_.pages().Reserve(request); });
    const absl::Status taken = TakeGrant(entry, span, request.epoch(), sent, granted);
    if (!taken.ok()) NoteFailure(entry, taken);
    HW_RETURN_IF_ERROR(taken);
  }
  return absl::OkStatus();
}

void SimHostTier::SendGrant(Entry& entry, RemoteSequence::PageSpan span) {
  const SequenceId id = entry.sequence->id();
  const v1::ReserveRequest request = ReserveRequestOf(*entry.sequence, span);
  entry.in_flight = true;
  world_.network.Call<v1::ReserveResponse>(
      link_.caller(), kTimeout,
      [&service = service_, request] { return service.pages().Reserve(request); },
      [this, id, number = entry.number, span, epoch = request.epoch(),
       sent = world_.clock.Now()](const absl::StatusOr<v1::ReserveResponse>& granted) {
        Entry* const found = Find(id, number);
        if (found == nullptr) return;
        found->in_flight = false;
        if (found->orphan) return;
        const absl::Status taken = TakeGrant(*found, span, epoch, sent, granted);
        if (!taken.ok()) NoteFailure(*found, taken);
      });
}

void SimHostTier::SendSkip(Entry& entry, RemoteSequence::PageSpan span) {
  v1::AbortRequest request;
  request.set_sequence_id(entry.sequence->id());
  request.set_epoch(link_.epoch());
  request.set_rank(link_.options().rank);
  request.set_first_page(span.first);
  request.set_num_pages(span.count);
  entry.in_flight = true;
  world_.network.Call<v1::AbortResponse>(
      link_.caller(), kTimeout,
      [&service = service_, request] { return service.pages().Abort(request); },
      [this, id = request.sequence_id(), number = entry.number,
       span](const absl::StatusOr<v1::AbortResponse>& skipped) {
        Entry* const found = Find(id, number);
        if (found == nullptr) return;
        found->in_flight = false;
        if (found->orphan) return;
        if (skipped.ok()) {
          found->sequence->AddSkip(span);
        } else {
          NoteFailure(*found, skipped.status());
        }
      });
}

void SimHostTier::Push(Entry& entry) {
  RemoteSequence& sequence = *entry.sequence;
  const int64_t begin = sequence.committed();
  const int64_t end =
      std::min(sequence.CommitEnd(), begin + kPushPages * sequence.geometry().page_tokens);
  const LocalRows local = sequence.RowsToMove(begin, end);
  if (MayNotWrite(entry)) return;
  if (sequence.slab() != nullptr) {
    local.CopyToSlab();
    sequence.Committed(end);
    return;
  }
  entry.in_flight = true;
  // The rows as they are now: below what was published nothing changes.
  const SequenceId id = sequence.id();
  const Epoch epoch = link_.epoch();
  auto chunks = std::make_shared<std::vector<v1::WriteRequest>>();
  for (const PageRows& page : local.rows) {
    v1::WriteRequest& request = chunks->emplace_back();
    request.set_sequence_id(id);
    request.set_epoch(epoch);
    request.set_rank(link_.options().rank);
    request.set_layer(page.layer);
    request.set_kv_head(page.kv_head);
    request.set_first_position(page.first_position);
    request.set_rows(page.rows.data(), page.rows.size());
    request.set_crc32c(Crc32c(page.rows));
  }
  v1::CommitRequest commit;
  commit.set_sequence_id(id);
  commit.set_epoch(epoch);
  commit.set_rank(link_.options().rank);
  commit.set_tokens(end);
  world_.network.Call<bool>(
      link_.caller(), kTimeout,
      [&service = service_, chunks, commit]() -> absl::StatusOr<bool> {
        for (const v1::WriteRequest& request : *chunks) {
          HW_RETURN_IF_ERROR(service.pages().WriteChunk(request).status());
        }
        HW_RETURN_IF_ERROR(service.pages().Commit(commit));
        return true;
      },
      [this, id, number = entry.number, end](const absl::StatusOr<bool>& written) {
        Entry* const found = Find(id, number);
        if (found == nullptr) return;
        found->in_flight = false;
        if (found->orphan) return;
        if (written.ok()) {
          found->sequence->Committed(end);
        } else {
          NoteFailure(*found, written.status());
        }
      });
}

void SimHostTier::NoteFailure(Entry& entry, const absl::Status& status) {
  entry.refused = status;
  entry.next_try = world_.clock.Now() + kRetry;
  if (absl::IsNotFound(status) || absl::IsFailedPrecondition(status) ||
      absl::IsInvalidArgument(status) || absl::IsDataLoss(status)) {
    world_.trace.Note(absl::StrCat("pages refused: ", absl::StatusCodeToString(status.code())),
                      entry.sequence->id());
    MakeOrphan(entry);
  }
}

bool SimHostTier::HasEnded(const Entry& entry) const {
  if (!entry.closing()) return false;
  const RemoteSequence& sequence = *entry.sequence;
  return entry.orphan || sequence.committed() >= sequence.published() ||
         world_.clock.Now() > entry.closed + kGiveUp;
}

void SimHostTier::EraseEnded() {
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    // A call about it holds it in the real one's thread.
    if (entry->second.in_flight || !HasEnded(entry->second)) {
      ++entry;
      continue;
    }
    if (entry->second.listed) link_.RemoveSequence(entry->first);
    const std::function<void()> written = std::move(entry->second.when_written);
    entry = entries_.erase(entry);
    if (written) written();
  }
}

}  // namespace heavywater
