// Pages that rest: how they come back, and when more of them should go.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/ordered_page_store.h"

namespace heavywater {
namespace {

// A page that moves between the tiers below while it is asked for is found by the next try.
constexpr int kMaxTries = 4;
// Pressure is looked up by every rank's heartbeats: over all sequences only so often.
constexpr absl::Duration kPressureAge = absl::Milliseconds(100);
// Who found no room is likely to try again within this time.
constexpr absl::Duration kWantedFor = absl::Seconds(5);

}  // namespace

absl::StatusOr<Reservation> OrderedPageStore::Reserve(const PageRange& range, bool direct) {
  absl::StatusOr<Reservation> reserved = host_->Reserve(range, direct);
  // A page below is what the host's tier cannot give: rare, so it is looked for only then.
  if (!absl::IsFailedPrecondition(reserved.status())) return reserved;
  HW_ASSIGN_OR_RETURN(const std::vector<PagePlace> below, host_->PagesBelow(range));
  if (below.empty()) return reserved;
  HW_RETURN_IF_ERROR(BringUpRange(range));
  return host_->Reserve(range, direct);
}

absl::Status OrderedPageStore::BringUpRange(const PageRange& range) {
  absl::Status status;
  for (int round = 0; round < kMaxTries; ++round) {
    HW_ASSIGN_OR_RETURN(const std::vector<PagePlace> below, host_->PagesBelow(range));
    if (below.empty()) return absl::OkStatus();
    HW_RETURN_IF_ERROR(MakeQuotaRoom(range.sequence, below));
    for (const PagePlace& place : below) {
      const PageId page = {place.key.layer, place.key.kv_head, place.key.page};
      // So that it stays, once it is up, while the others come.
      HW_RETURN_IF_ERROR(host_->AskOrLocate(range.sequence, range.rank, page).status());
      status = BringUpPage(place);
      if (!status.ok() && !absl::IsNotFound(status)) return status;
    }
  }
  if (!status.ok()) return status;
  return absl::UnavailableError(
      absl::StrCat("pages of sequence ", range.sequence, " are still on their way"));
}

absl::StatusOr<std::vector<absl::StatusOr<int64_t>>> OrderedPageStore::Ask(
    SequenceId sequence, int rank, std::span<const PageId> pages) {
  // What lies in the slab at once: the others may have to wait for each other.
  absl::StatusOr<std::vector<absl::StatusOr<int64_t>>> offsets = host_->Ask(sequence, rank, pages);
  if (!offsets.ok()) return offsets;
  int64_t lost = 0;
  int64_t wanted = 0;
  const int64_t page_bytes = host_->PageBytes(sequence);
  for (size_t i = 0; i < pages.size(); ++i) {
    absl::StatusOr<int64_t>& offset = (*offsets)[i];
    if (absl::IsUnavailable(offset.status())) offset = AskPage(sequence, rank, pages[i]);
    if (absl::IsNotFound(offset.status()) || absl::IsDataLoss(offset.status())) ++lost;
    if (absl::IsResourceExhausted(offset.status())) wanted += page_bytes;
  }
  host_->NoteAsked(static_cast<int64_t>(pages.size()), lost);
  if (wanted > 0) NoteWanted(wanted);
  return offsets;
}

absl::StatusOr<int64_t> OrderedPageStore::AskPage(SequenceId sequence, int rank,
                                                  const PageId& page) {
  absl::Status status;
  for (int tried = 0; tried < kMaxTries; ++tried) {
    HW_ASSIGN_OR_RETURN(const SequencePages::Asked asked, host_->AskOrLocate(sequence, rank, page));
    if (!asked.below.has_value()) return asked.offset;
    // Where the tenant's quota is full others of its pages that rest may go, this sequence's too.
    const absl::Status quota =
        host_->CheckHostQuota(sequence, Slab::RoundUp(asked.below->page_bytes));
    const std::optional<TenantShortage> tenant = TenantShortageOf(quota);
    HW_RETURN_IF_ERROR(tenant.has_value() ? MakeTenantRoom(quota, *tenant) : quota);
    status = BringUpPage(*asked.below);
    if (!status.ok() && !absl::IsNotFound(status)) return status;
  }
  if (!status.ok()) return status;
  return absl::UnavailableError(absl::StrCat("page ", page.page, ", layer ", page.layer,
                                             ", kv_head ", page.kv_head, " is on its way"));
}

void OrderedPageStore::NoteWanted(int64_t bytes) {
  MutexLock lock(&mutex_);
  const absl::Time now = clock_.Now();
  wanted_bytes_ = now < wanted_until_ ? std::max(wanted_bytes_, bytes) : bytes;
  wanted_until_ = now + kWantedFor;
  pressure_until_ = absl::InfinitePast();
}

HostPressure OrderedPageStore::Pressure() {
  int64_t wanted = 0;
  {
    MutexLock lock(&mutex_);
    const absl::Time now = clock_.Now();
    if (now < pressure_until_) return pressure_;
    pressure_until_ = now + kPressureAge;
    if (now < wanted_until_) wanted = wanted_bytes_;
  }
  const HostPressure pressure = FindPressure(wanted);
  MutexLock lock(&mutex_);
  pressure_ = pressure;
  return pressure;
}

HostPressure OrderedPageStore::FindPressure(int64_t wanted_bytes) {
  int64_t free_below = 0;
  for (int tier = 1; tier < num_tiers(); ++tier) free_below += TierAt(tier).Stats().free_bytes;
  if (free_below == 0) return {};
  const int64_t total = host_->slab().total_bytes();
  const int64_t promised = host_->Stats().promised_bytes;
  const int64_t stays = host_->TakenBytes() - host_->MovableBytes();
  // What is nearly full goes on until the low watermark; somebody who found no room needs no
  // more than that.
  const int64_t too_much =
      IsAboveWatermark(kHostTier) ? stays - total / 100 * options_.low_percent : 0;
  const int64_t shortage = std::max(too_much, stays + wanted_bytes - total);
  return {.shortage_bytes = std::clamp<int64_t>(shortage, 0, free_below),
          .restable_bytes = std::max<int64_t>(stays - promised, 0)};
}

}  // namespace heavywater
