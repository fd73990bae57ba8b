#include "tests/sim/system/sim_host_tier.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

constexpr int64_t kMaxLocalPages = 64;  // of all sequences, as page numbers

}  // namespace

// One of the same id that still has rows to hand over is in the way, as it is there after a
// second.
void SimHostTier::Expect(SequenceId sequence, int64_t max_tokens, absl::Duration lease) {
  EraseEnded();
  const auto found = entries_.find(sequence);
  if (found != entries_.end() && found->second.closing()) return;
  Entry& entry = entries_[sequence];
  entry.max_tokens = max_tokens;
  entry.lease = lease;
}

void SimHostTier::Forget(SequenceId sequence) {
  const auto found = entries_.find(sequence);
  if (found != entries_.end() && found->second.sequence == nullptr) entries_.erase(found);
}

SimHostTier::Entry* SimHostTier::FindOpen(SequenceId sequence) {
  const auto found = entries_.find(sequence);
  if (dead_ || found == entries_.end()) return nullptr;
  Entry& entry = found->second;
  return entry.sequence == nullptr || entry.closing() ? nullptr : &entry;
}

SimHostTier::Entry* SimHostTier::Find(SequenceId sequence, uint64_t number) {
  const auto found = entries_.find(sequence);
  return found == entries_.end() || found->second.number != number ? nullptr : &found->second;
}

absl::Status SimHostTier::OpenSequence(SequenceId sequence, const PageGeometry& geometry,
                                       HeadRange heads) {
  Entry& entry = entries_[sequence];
  if (entry.sequence != nullptr) {
    return absl::AlreadyExistsError(absl::StrCat("sequence ", sequence, " is open"));
  }
  entry.sequence = std::make_unique<RemoteSequence>(sequence, geometry, heads, slab_);
  entry.number = next_number_++;
  link_.AddSequence(sequence);
  entry.listed = true;
  return absl::OkStatus();
}

absl::Status SimHostTier::Reserve(SequenceId sequence, int64_t first_page, int64_t num_pages) {
  Entry* const entry = FindOpen(sequence);
  if (entry == nullptr) return absl::NotFoundError("simulated: not open");
  const int64_t end_page = first_page + num_pages;
  if (entry->sequence->num_pages() >= end_page) return absl::OkStatus();
  if (entry->orphan) return absl::UnavailableError("simulated: the service does not know it");
  if (entry->sequence->num_pages() < first_page) {
    entry->sequence->SkipPages(entry->sequence->num_pages(), first_page);
  }
  const int64_t wanted_before = entry->wanted_pages;
  entry->wanted_pages = std::max(wanted_before, end_page);
  entry->refused = absl::OkStatus();
  // Where a call is under way, or the answer does not come within its time, the pages are
  // held here.
  if (!entry->in_flight && (world_.calm || !world_.OneIn(12))) {
    const absl::Status reserved = ReserveNow(*entry, end_page);
    if (entry->sequence->num_pages() >= end_page) return absl::OkStatus();
    if (absl::IsResourceExhausted(reserved)) {
      entry->wanted_pages = wanted_before;
      return reserved;
    }
  }
  int64_t held = 0;
  for (const auto& [id, other] : entries_) {
    if (other.sequence == nullptr) continue;
    held += other.sequence->ungranted_bytes() / other.sequence->page_row_bytes();
  }
  if (held + end_page - entry->sequence->num_pages() > kMaxLocalPages) {
    return absl::UnavailableError("simulated: too many pages are held already");
  }
  world_.trace.Note("pages held by a rank", sequence, static_cast<uint64_t>(end_page));
  return entry->sequence->AddLocalPages(end_page);
}

void SimHostTier::Skip(SequenceId sequence, int64_t first_page, int64_t num_pages) {
  Entry* const entry = FindOpen(sequence);
  if (entry == nullptr) return;
  world_.trace.Note("pages skipped", sequence, static_cast<uint64_t>(first_page));
  entry->sequence->SkipPages(first_page, first_page + num_pages);
  entry->next_try = absl::InfinitePast();
}

// The fence: worker/server/remote_host_tier_fence.cc has the argument.
bool SimHostTier::IsFenced(const Entry& entry) const {
  const RemoteSequence& sequence = *entry.sequence;
  if (sequence.slab() == nullptr || sequence.granted_pages() == 0) return false;
  const absl::Duration margin = std::min(entry.lease / 10, absl::Seconds(2));
  return world_.clock.Now() >= link_.RenewedAt(sequence.id()) + entry.lease - margin;
}

bool SimHostTier::MayNotWrite(Entry& entry) {
  if (!entry.orphan && IsFenced(entry)) {
    world_.trace.Note("fence", entry.sequence->id());
    MakeOrphan(entry);
  }
  return entry.orphan;
}

bool SimHostTier::IsLost(SequenceId sequence) const {
  const auto found = entries_.find(sequence);
  if (found == entries_.end()) return false;
  const Entry& entry = found->second;
  return entry.orphan || (entry.sequence != nullptr && IsFenced(entry));
}

std::byte* SimHostTier::Page(SequenceId sequence, int layer, int kv_head, int64_t page) {
  Entry* const entry = FindOpen(sequence);
  if (entry == nullptr || MayNotWrite(*entry)) return nullptr;
  return entry->sequence->Page(layer, kv_head, page);
}

const std::byte* SimHostTier::Peek(SequenceId sequence, int layer, int kv_head,
                                   int64_t page) const {
  const auto found = entries_.find(sequence);
  if (found == entries_.end() || found->second.sequence == nullptr) return nullptr;
  return found->second.sequence->Page(layer, kv_head, page);
}

void SimHostTier::Publish(SequenceId sequence, int64_t tokens) {
  Entry* const entry = FindOpen(sequence);
  if (entry == nullptr || MayNotWrite(*entry)) return;
  entry->sequence->Publish(tokens);
}

int64_t SimHostTier::StoredTokens(SequenceId sequence) const {
  const auto found = entries_.find(sequence);
  if (found == entries_.end() || found->second.sequence == nullptr) return 0;
  const Entry& entry = found->second;
  return entry.orphan || IsFenced(entry) ? 0 : entry.sequence->stored();
}

void SimHostTier::CloseSequence(SequenceId sequence) {
  Entry* const entry = FindOpen(sequence);
  if (entry == nullptr) return;
  entry->closed = world_.clock.Now();
  if (entry->orphan) StopListing(*entry);
}

std::map<SequenceId, int64_t> SimHostTier::Published() const {
  std::map<SequenceId, int64_t> published;
  for (const auto& [id, entry] : entries_) {
    if (entry.sequence == nullptr || entry.closing() || entry.orphan) continue;
    if (entry.sequence->published() > 0) published[id] = entry.sequence->published();
  }
  return published;
}

void SimHostTier::EndStep(const Row& row) {
  dead_ = false;
  for (const auto& [id, position] : Published()) {
    const RemoteSequence& sequence = *entries_.at(id).sequence;
    const PageGeometry& geometry = sequence.geometry();
    bool written = true;
    for (int i = 0; i < geometry.num_layers * sequence.heads().count; ++i) {
      const int layer = i / sequence.heads().count;
      const int head = sequence.heads().first + i % sequence.heads().count;
      std::byte* const page = Page(id, layer, head, geometry.PageOf(position));
      const std::span<const std::byte> bytes = row(id, layer, head);
      written = written && page != nullptr && !bytes.empty();
      if (!written) break;
      std::memcpy(page + int64_t{geometry.RowOf(position)} * geometry.row_bytes, bytes.data(),
                  bytes.size());
    }
    if (!written) continue;
    world_.trace.Note("a row of a process that was replaced", id, static_cast<uint64_t>(position));
    Publish(id, position + 1);
  }
  dead_ = true;
}

void SimHostTier::WhenWritten(SequenceId sequence, std::function<void()> done) {
  const auto found = entries_.find(sequence);
  if (found != entries_.end() && found->second.sequence != nullptr) {
    found->second.when_written = std::move(done);
    return;
  }
  done();
}

int64_t SimHostTier::reserved_bytes() const {
  int64_t bytes = 0;
  for (const auto& [id, entry] : entries_) {
    if (entry.sequence != nullptr && !entry.orphan) bytes += entry.sequence->reserved_bytes();
  }
  return bytes;
}

void SimHostTier::NoteUnknown(SequenceId sequence) {
  const auto found = entries_.find(sequence);
  if (found == entries_.end() || found->second.sequence == nullptr) {
    link_.ForgetSequence(sequence);
    return;
  }
  Entry& entry = found->second;
  entry.unknown = true;
  MakeOrphan(entry);
  StopListing(entry);
}

void SimHostTier::MakeOrphan(Entry& entry) {
  if (entry.orphan) return;
  entry.orphan = true;
  world_.trace.Note("orphan", entry.sequence->id());
  StopListing(entry);
}

void SimHostTier::StopListing(Entry& entry) {
  if (!entry.orphan) return;
  if (entry.unknown) link_.ForgetSequence(entry.sequence->id());
  if (entry.listed && !entry.unknown) link_.RemoveSequence(entry.sequence->id());
  entry.listed = false;
}

}  // namespace heavywater
