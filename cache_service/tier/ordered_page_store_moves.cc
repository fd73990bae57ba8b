// How pages go down, and how what has ended is erased.
#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/crc32c.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/ordered_page_store.h"
#include "cache_service/tier/stored_page.h"

namespace heavywater {

bool OrderedPageStore::Turn() {
  bool worked = false;
  for (int tier = 1; tier < num_tiers(); ++tier) worked |= EraseEnded(tier);
  // The lowest first: it makes the room that the ones above will need.
  for (int tier = num_tiers() - 2; tier >= kHostTier; --tier) {
    if (IsAboveWatermark(tier)) worked |= MoveDown(tier) > 0;
  }
  return worked;
}

bool OrderedPageStore::IsAboveWatermark(int tier) {
  const bool is_host = tier == kHostTier;
  const LowerTierStats below = is_host ? LowerTierStats() : TierAt(tier).Stats();
  const int64_t used = is_host ? host_->TakenBytes() : below.used_bytes;
  const int64_t total = is_host ? host_->slab().total_bytes() : below.total_bytes;
  MutexLock lock(&mutex_);
  bool& draining = is_host ? host_draining_ : below_[tier - 1].draining;
  if (used > total / 100 * options_.high_percent) draining = true;
  if (used <= total / 100 * options_.low_percent) draining = false;
  return draining;
}

int64_t OrderedPageStore::MoveDown(int from, const MoveFilter& filter, int64_t* freed) {
  int64_t ignored = 0;
  if (freed == nullptr) freed = &ignored;
  MutexLock lock(&move_mutexes_[from]);
  int to = TargetBelow(from);
  while (to != kHostTier) {
    const HostPageStore::Moves moves = host_->BeginMoves(from, options_.max_move_bytes, filter);
    *freed += moves.freed_bytes;
    if (moves.pages.empty()) return moves.freed_bytes;
    const Batch batch = CopyBatch(from, moves.pages);
    const int64_t moved = moves.freed_bytes + MoveBatch(from, to, batch, freed);
    // Pages that are damaged where they lie do not come again: others may move. Where a
    // tier has refused them, the next one is asked; not one above it once more.
    const int next = TargetBelow(from);
    const bool again = next > to || (next == to && batch.damaged > 0);
    if (moved > 0 || !again) return moved;
    to = next;
  }
  return 0;
}

int64_t OrderedPageStore::MoveBatch(int from, int to, const Batch& batch, int64_t* freed) {
  if (batch.places.empty()) return 0;
  {
    MutexLock lock(&mutex_);
    lowered_.insert(batch.places.front().key.sequence);
  }
  int64_t need = 0;
  for (const PageCopy& copy : batch.copies) {
    need += StoredBytes(static_cast<int64_t>(copy.bytes.size()));
  }
  while (TierAt(to).Stats().free_bytes < need && MoveDown(to) > 0) {
  }
  return FinishMoves(from, to, batch, TierAt(to).Put(batch.copies), freed);
}

absl::Status OrderedPageStore::CopyPage(const PagePlace& place, std::span<std::byte> bytes) {
  if (place.tier == kHostTier) return host_->CopyOut(place, bytes);
  const absl::StatusOr<uint32_t> crc = TierAt(place.tier).Get(place.key, bytes);
  if (!crc.ok()) return crc.status();
  if (*crc == place.crc32c) return absl::OkStatus();
  // A page of the same key, whole, but not the one that was stored.
  return absl::DataLossError(
      absl::StrCat(Describe(place.key), ": checksum is ", *crc, ", want ", place.crc32c));
}

absl::Status OrderedPageStore::CopyDecoded(const PagePlace& place, std::span<std::byte> page) {
  if (place.coding == PageDtype::kOpaque) return CopyPage(place, page);
  std::vector<std::byte> coded(place.stored_bytes());
  HW_RETURN_IF_ERROR(CopyPage(place, coded));
  return DecodePage(place.geometry, place.coding, coded, page);
}

// A page with a NaN goes down as it is: nothing of it gets lost, and nobody is told that it is
// something else.
std::span<std::byte> OrderedPageStore::Encode(const PagePlace& place, std::span<std::byte> page,
                                              StoredAs* as) {
  if (!options_.code_pages || place.tier != kHostTier || !IsCoded(place.geometry, place.dtype)) {
    return page;
  }
  std::vector<std::byte> coded(CodedBytes(place.geometry, place.dtype));
  if (!EncodePage(place.geometry, place.dtype, page, coded).ok()) return page;
  *as = {place.dtype, Crc32c(coded)};
  std::memcpy(page.data(), coded.data(), coded.size());
  return page.first(coded.size());
}

OrderedPageStore::Batch OrderedPageStore::CopyBatch(int from,
                                                    const std::vector<PagePlace>& places) {
  Batch batch;
  const auto page_bytes = static_cast<size_t>(places.front().page_bytes);
  batch.memory.resize(page_bytes * places.size());
  const std::span<std::byte> memory(batch.memory);
  for (const PagePlace& place : places) {
    const std::span<std::byte> bytes =
        memory.subspan(batch.places.size() * page_bytes, static_cast<size_t>(place.stored_bytes()));
    const absl::Status copied = CopyPage(place, bytes);
    if (copied.ok()) {
      StoredAs as = {place.coding, place.crc32c};
      const std::span<std::byte> stored = Encode(place, bytes, &as);
      batch.places.push_back(place);
      batch.copies.push_back({place.key, stored, as.crc32c});
      batch.stored_as.push_back(as);
      continue;
    }
    CountFailure(from, copied);
    if (absl::IsDataLoss(copied) || absl::IsNotFound(copied)) {
      host_->MarkStuck(place.key);
      ++batch.damaged;
    }
    host_->Settle(place.key);
  }
  return batch;
}

int64_t OrderedPageStore::FinishMoves(int from, int to, const Batch& batch,
                                      const std::vector<absl::Status>& stored, int64_t* freed) {
  int64_t moved = 0;
  absl::Status refused;
  std::vector<PageKey> left;      // copies in the tier that they have left
  std::vector<PageKey> unwanted;  // copies in the tier to which they did not move after all
  for (size_t i = 0; i < batch.places.size(); ++i) {
    const PagePlace& place = batch.places[i];
    if (!stored[i].ok()) {
      CountFailure(to, stored[i]);
      refused.Update(stored[i]);
      continue;
    }
    switch (host_->Relocate(place, to, batch.stored_as[i], freed)) {
      case Relocation::kMoved:
        ++moved;
        left.push_back(place.key);
        break;
      case Relocation::kKept:
        unwanted.push_back(place.key);
        break;
      case Relocation::kGone:
        EraseLater(to, place.key.sequence);
    }
  }
  Note(to, refused);
  if (from != kHostTier && !left.empty()) {
    const absl::Status erased = TierAt(from).Erase(left);
    if (!erased.ok()) CountFailure(from, erased);
  }
  if (!unwanted.empty()) {
    const absl::Status erased = TierAt(to).Erase(unwanted);
    if (!erased.ok()) CountFailure(to, erased);
  }
  // Not before its other copy is erased: it must not come back there meanwhile.
  for (const PagePlace& place : batch.places) host_->Settle(place.key);
  MutexLock lock(&mutex_);
  below_[to - 1].counters.moved_in += moved;
  if (from != kHostTier) below_[from - 1].counters.moved_down += moved;
  return batch.places.empty() ? 0 : moved * batch.places.front().page_bytes;
}

void OrderedPageStore::EraseLater(int tier, SequenceId sequence) {
  MutexLock lock(&mutex_);
  lowered_.erase(sequence);
  std::deque<SequenceId>& to_erase = below_[tier - 1].to_erase;
  if (to_erase.empty() || to_erase.back() != sequence) to_erase.push_back(sequence);
}

bool OrderedPageStore::EraseEnded(int tier) {
  SequenceId sequence = 0;
  {
    MutexLock lock(&mutex_);
    Below& below = below_[tier - 1];
    if (below.to_erase.empty()) return false;
    sequence = below.to_erase.front();
    below.to_erase.pop_front();
  }
  const absl::Status erased = TierAt(tier).EraseSequence(sequence);
  MutexLock lock(&mutex_);
  Below& below = below_[tier - 1];
  if (!erased.ok()) {
    below.to_erase.push_back(sequence);  // counts as used until then
    return false;
  }
  below.rests_until = absl::InfinitePast();  // it has room again
  return true;
}

}  // namespace heavywater
