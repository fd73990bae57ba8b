#include "cache_service/tier/ordered_page_store.h"

#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/shortage.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

// A page can move once between its place being looked up and its being read; more
// often only where moves outrun reads.
constexpr int kMaxLookups = 4;
constexpr int kMaxRounds = 4;
constexpr absl::Duration kRetryAfter = absl::Seconds(1);

}  // namespace

OrderedPageStore::OrderedPageStore(std::unique_ptr<HostPageStore> host,
                                   std::vector<std::unique_ptr<LowerTier>> below,
                                   OrderedStoreOptions options, Clock& clock)
    : host_(std::move(host)), options_(options), clock_(clock) {
  HW_CHECK(below.size() < kMaxTiers);
  for (std::unique_ptr<LowerTier>& tier : below) {
    Below& entry = below_.emplace_back();
    entry.counters.tier = tier->name();
    entry.tier = std::move(tier);
  }
}

absl::Status OrderedPageStore::Read(const RowRange& rows, std::span<std::byte> bytes) {
  int last_tier = kHostTier;
  absl::Status missing;
  for (int lookup = 0; lookup < kMaxLookups; ++lookup) {
    HW_ASSIGN_OR_RETURN(const std::optional<PagePlace> place, host_->ReadOrLocate(rows, bytes));
    if (!place.has_value()) return absl::OkStatus();
    if (place->tier == last_tier) break;  // it has not moved: it is not there
    last_tier = place->tier;
    missing = ReadBelow(*place, rows, bytes);
    if (!absl::IsNotFound(missing)) return missing;
  }
  CountFailure(last_tier, missing);
  return missing;
}

absl::Status OrderedPageStore::ReadBelow(const PagePlace& place, const RowRange& rows,
                                         std::span<std::byte> bytes) {
  std::vector<std::byte> page(place.page_bytes);
  const absl::Status status = CopyDecoded(place, page);
  if (!status.ok()) {
    if (!absl::IsNotFound(status)) CountFailure(place.tier, status);
    return status;
  }
  const auto row_bytes = static_cast<int64_t>(bytes.size()) / rows.num_positions;
  const int64_t page_tokens = place.page_bytes / row_bytes;
  std::memcpy(bytes.data(), page.data() + rows.first_position % page_tokens * row_bytes,
              bytes.size());
  {
    MutexLock lock(&mutex_);
    ++below_[place.tier - 1].counters.hits;
    below_bytes_read_ += static_cast<int64_t>(bytes.size());
  }
  Promote(place, page, host_->slab().total_bytes() / 100 * options_.low_percent);
  return absl::OkStatus();
}

absl::Status OrderedPageStore::BringUp(SequenceId sequence, int64_t tokens) {
  absl::Status status;
  host_->StopResting(sequence);
  // Those that were on their way down meanwhile come with the next round.
  for (int round = 0; round < kMaxRounds; ++round) {
    HW_ASSIGN_OR_RETURN(const std::vector<PagePlace> below, host_->PagesBelow(sequence, tokens));
    if (below.empty()) return absl::OkStatus();
    HW_RETURN_IF_ERROR(MakeQuotaRoom(sequence, below));
    for (const PagePlace& place : below) {
      status = BringUpPage(place, /*except=*/sequence);
      if (absl::IsResourceExhausted(status)) return NoRoomFor(sequence, tokens);
      if (!status.ok() && !absl::IsNotFound(status)) return status;
    }
  }
  return status.ok() ? NoRoomFor(sequence, tokens) : status;
}

absl::Status OrderedPageStore::NoRoomFor(SequenceId sequence, int64_t tokens) {
  HW_ASSIGN_OR_RETURN(const std::vector<PagePlace> below, host_->PagesBelow(sequence, tokens));
  int64_t need = 0;
  for (const PagePlace& place : below) need += Slab::RoundUp(place.page_bytes);
  const int64_t total = host_->slab().total_bytes();
  const int64_t free = total - host_->TakenBytes();
  return ExhaustedError(absl::StrCat("pages of sequence ", sequence, " that lie below need ", need,
                                     " bytes of host memory, ", free, " are free of ", total),
                        {.subject = "host_bytes",
                         .need = need,
                         .available = free,
                         .limit = total,
                         .retry_after = need <= total ? kRetryAfter : absl::InfiniteDuration()});
}

absl::Status OrderedPageStore::BringUpPage(const PagePlace& place, SequenceId except) {
  std::vector<std::byte> page(place.page_bytes);
  const absl::Status copied = CopyDecoded(place, page);
  if (!copied.ok()) {
    if (!absl::IsNotFound(copied)) CountFailure(place.tier, copied);
    return copied;
  }
  const int64_t total = host_->slab().total_bytes();
  for (bool tried = false; !Promote(place, page, total); tried = true) {
    const int64_t free = total - host_->TakenBytes();
    const bool has_room = free >= Slab::RoundUp(place.page_bytes);
    // It moves itself: the next round has it. Or what is free is not in one piece.
    if (has_room && tried) return absl::OkStatus();
    if (MoveDown(kHostTier, {.except = except}) > 0 || has_room) continue;
    return absl::ResourceExhaustedError(absl::StrCat(Describe(place.key), " needs ",
                                                     place.page_bytes, " bytes of host memory, ",
                                                     free, " are free of ", total));
  }
  return absl::OkStatus();
}

bool OrderedPageStore::Promote(const PagePlace& place, std::span<const std::byte> page,
                               int64_t max_used_bytes) {
  if (!host_->Promote(place, page, max_used_bytes)) return false;
  // Until it is settled nobody can move it down again, to where it is erased now.
  const absl::Status erased = TierAt(place.tier).Erase({&place.key, 1});
  if (!erased.ok()) CountFailure(place.tier, erased);
  {
    MutexLock lock(&mutex_);
    ++below_[place.tier - 1].counters.moved_up;
  }
  host_->Settle(place.key);
  return true;
}

absl::Status OrderedPageStore::Release(SequenceId sequence) {
  HW_RETURN_IF_ERROR(host_->Release(sequence));
  MutexLock lock(&mutex_);
  if (lowered_.erase(sequence) == 0) return absl::OkStatus();
  for (Below& below : below_) below.to_erase.push_back(sequence);
  return absl::OkStatus();
}

absl::StatusOr<HostPageStore::Restored> OrderedPageStore::Restore() {
  HW_ASSIGN_OR_RETURN(HostPageStore::Restored restored, host_->Restore());
  std::vector<std::vector<StoredPage>> by_tier(num_tiers());
  const absl::flat_hash_set<SequenceId> ended(restored.retiring.begin(), restored.retiring.end());
  for (const PagePlace& place : restored.below) {
    if (place.tier >= num_tiers()) {
      return absl::DataLossError(
          absl::StrCat(Describe(place.key), " lies in tier ", place.tier, " of ", num_tiers()));
    }
    if (ended.contains(place.key.sequence)) continue;  // nobody asks for it
    by_tier[place.tier].push_back({place.key, place.stored_bytes()});
    MutexLock lock(&mutex_);
    lowered_.insert(place.key.sequence);
  }
  for (int tier = 1; tier < num_tiers(); ++tier) {
    HW_RETURN_IF_ERROR(TierAt(tier).Restore(by_tier[tier]));
  }
  return restored;
}

absl::Status OrderedPageStore::MakeRoom(const absl::Status& full, SequenceId spared) {
  if (!has_lower_tiers() || !absl::IsResourceExhausted(full)) return full;
  for (int tier = 1; tier < num_tiers(); ++tier) EraseEnded(tier);
  if (const auto tenant = TenantShortageOf(full); tenant.has_value()) {
    return MakeTenantRoom(full, *tenant, spared);
  }
  const std::optional<Shortage> shortage = ShortageOf(full);
  if (shortage.has_value() && shortage->need > shortage->limit) return full;
  // Without figures (no place in one piece) a batch at a time.
  int64_t missing = shortage.has_value() ? shortage->need - shortage->available : 1;
  while (missing > 0) {
    int64_t freed = 0;
    if (MoveDown(kHostTier, {.except = spared}, &freed) == 0) {
      if (shortage.has_value()) NoteWanted(shortage->need);
      return full;
    }
    missing -= shortage.has_value() ? freed : 1;
  }
  return absl::OkStatus();
}

absl::Status OrderedPageStore::MakeQuotaRoom(SequenceId sequence,
                                             const std::vector<PagePlace>& below) {
  int64_t bytes = 0;
  for (const PagePlace& place : below) bytes += Slab::RoundUp(place.page_bytes);
  const absl::Status quota = host_->CheckHostQuota(sequence, bytes);
  const std::optional<TenantShortage> tenant = TenantShortageOf(quota);
  return tenant.has_value() ? MakeTenantRoom(quota, *tenant, sequence) : quota;
}

absl::Status OrderedPageStore::MakeTenantRoom(const absl::Status& full,
                                              const TenantShortage& tenant, SequenceId except) {
  const std::optional<Shortage> shortage = ShortageOf(full);
  if (tenant.what != "host_bytes" || shortage->need > shortage->limit) return full;
  int64_t missing = shortage->need - shortage->available;
  while (missing > 0) {
    const int64_t moved = MoveDown(kHostTier, {.except = except, .tenant = tenant.tenant});
    if (moved == 0) return full;
    missing -= moved;
  }
  return absl::OkStatus();
}

PageStoreStats OrderedPageStore::Stats() const {
  PageStoreStats stats = host_->Stats();
  std::vector<LowerTierStats> held;
  for (const Below& below : below_) held.push_back(below.tier->Stats());
  MutexLock lock(&mutex_);
  stats.bytes_read += below_bytes_read_;
  for (size_t i = 0; i < below_.size(); ++i) {
    TierStats& tier = stats.below.emplace_back(below_[i].counters);
    tier.total_bytes = held[i].total_bytes;
    tier.used_bytes = held[i].used_bytes;
    tier.free_bytes = held[i].free_bytes;
    tier.pages = held[i].pages;
    stats.reads += tier.hits;
  }
  return stats;
}

int OrderedPageStore::TargetBelow(int from) {
  MutexLock lock(&mutex_);
  for (int tier = from + 1; tier < num_tiers(); ++tier) {
    if (clock_.Now() >= below_[tier - 1].rests_until) return tier;
  }
  return kHostTier;
}

void OrderedPageStore::Note(int tier, const absl::Status& stored) {
  {
    MutexLock lock(&mutex_);
    Below& below = below_[tier - 1];
    if (!stored.ok()) below.rests_until = clock_.Now() + options_.rest;
    if (below.refuses == !stored.ok()) return;
    below.refuses = !stored.ok();
  }
  if (options_.on_change) options_.on_change(TierAt(tier).name(), stored);
}

void OrderedPageStore::CountFailure(int tier, const absl::Status& status) {
  if (tier == kHostTier) return;  // the host tier counts its own
  MutexLock lock(&mutex_);
  TierStats::Failures& failures = below_[tier - 1].counters.failures;
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      ++failures.full;
      break;
    case absl::StatusCode::kUnavailable:
      ++failures.unavailable;
      break;
    case absl::StatusCode::kDataLoss:
      ++failures.corrupt;
      break;
    case absl::StatusCode::kNotFound:
      ++failures.missing;
      break;
    default:
      ++failures.other;
  }
}

}  // namespace heavywater
