// How the registry makes room: finished sequences are kept until their leases end
// for whoever may want to read them, but only while nobody needs their place.
#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/shortage.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/sequence_registry.h"

namespace heavywater {
namespace {

// Others may take the room that was made.
constexpr int kMaxBringUps = 4;

template <typename Sequences>
std::vector<SequenceId> IdsOf(const Sequences& sequences) {
  std::vector<SequenceId> ids;
  for (const auto& one : sequences) ids.push_back(one.id);
  return ids;
}

int64_t TotalOf(const std::vector<int64_t>& bytes) {
  return std::accumulate(bytes.begin(), bytes.end(), int64_t{0});
}

}  // namespace

std::vector<SequenceRegistry::Finished> SequenceRegistry::FinishedSequences(
    const std::string* tenant, SequenceId spared) {
  std::vector<Finished> finished;
  for (const auto& [id, record] : records_) {
    if (!record.plans.all_finished() || record.suspended > absl::ZeroDuration()) continue;
    if (id == spared || pins_.IsPinned(id)) continue;
    if (tenant != nullptr && *tenant != record.request.tenant()) continue;
    finished.push_back({record.last_use, id, store_.SequenceBytes(id), store_.HostBytes(id)});
  }
  std::sort(finished.begin(), finished.end(), [](const Finished& a, const Finished& b) {
    return std::tie(a.last_use, a.id) < std::tie(b.last_use, b.id);
  });
  return finished;
}

void SequenceRegistry::Reclaim(SequenceId id) {
  const auto record = records_.find(id);
  reclaimed_[id] = record->second.request.tenant();
  End(record);
  ++num_reclaimed_;
  // What is remembered of the ended is bounded like the living.
  if (static_cast<int64_t>(reclaimed_.size()) > options_.max_sequences) {
    reclaimed_.erase(reclaimed_.begin());
  }
}

absl::Status SequenceRegistry::NameHolders(const absl::Status& full,
                                           const std::vector<Finished>& finished) {
  int64_t finished_bytes = 0;
  for (const Finished& one : finished) finished_bytes += one.host_bytes;
  int64_t all_bytes = 0;
  for (const auto& [id, record] : records_) all_bytes += store_.HostBytes(id);
  const std::string message =
      absl::StrCat(full.message(), "; ", records_.size() - finished.size(),
                   " sequences that are being written hold ", all_bytes - finished_bytes,
                   " bytes, ", finished.size(), " finished ones ", finished_bytes,
                   ", ended ones whose ranks may still write ", store_.Stats().retiring_bytes);
  const auto shortage = ShortageOf(full);
  return shortage.has_value() ? ExhaustedError(message, *shortage)
                              : absl::ResourceExhaustedError(message);
}

absl::Status SequenceRegistry::EndFinished(const absl::Status& full, SequenceId spared) {
  if (!absl::IsResourceExhausted(full)) return full;
  if (const auto tenant = TenantShortageOf(full); tenant.has_value()) {
    return EndFinishedOf(*tenant, full, spared);
  }
  const std::vector<Finished> finished = FinishedSequences(nullptr, spared);
  const auto shortage = ShortageOf(full);
  // Without figures (no place in one piece) one after the other.
  int64_t missing = shortage.has_value() ? shortage->need - shortage->available : 1;
  // Nothing is ended for what does not fit even so. What is ended in a lower tier makes
  // room there, to which pages of the host then move.
  if (TotalOf(store_.FreedBytes(IdsOf(finished))) < missing) return NameHolders(full, finished);
  for (const SequenceId id : ThoseThatHelp(finished, missing)) Reclaim(id);
  return absl::OkStatus();
}

// The longest unused ones whose ends make so much room together, without those that others
// keep all pages of.
std::vector<SequenceId> SequenceRegistry::ThoseThatHelp(const std::vector<Finished>& finished,
                                                        int64_t missing) {
  const std::vector<int64_t> freed = store_.FreedBytes(IdsOf(finished));
  std::vector<Finished> chosen;
  std::vector<SequenceId> in_vain;
  for (size_t i = 0; i < finished.size() && missing > 0; ++i) {
    const int64_t below = finished[i].bytes - finished[i].host_bytes;
    chosen.push_back(finished[i]);
    if (freed[i] + below == 0) in_vain.push_back(finished[i].id);
    missing -= freed[i] + below;
  }
  std::vector<SequenceId> ids = IdsOf(chosen);
  const int64_t total = TotalOf(store_.FreedBytes(ids));
  for (const SequenceId id : in_vain) {
    std::vector<SequenceId> others = ids;
    std::erase(others, id);
    // Unless what it shares is free only once it has ended, too.
    if (TotalOf(store_.FreedBytes(others)) == total) ids = std::move(others);
  }
  return ids;
}

// Of the tenant's own: nobody else's make room in its quota.
absl::Status SequenceRegistry::EndFinishedOf(const TenantShortage& tenant, const absl::Status& full,
                                             SequenceId spared) {
  const std::vector<Finished> finished = FinishedSequences(&tenant.tenant, spared);
  const auto gain = [&](const Finished& one) {
    if (tenant.what == "sequences") return int64_t{1};
    // They would stay its tenant's until their writers have stopped.
    return store_.HasWriters(one.id) ? int64_t{0} : one.host_bytes;
  };
  int64_t held = 0;
  for (const Finished& one : finished) held += gain(one);
  const auto shortage = ShortageOf(full);
  int64_t missing = shortage->need - shortage->available;
  if (held < missing) return full;
  for (const Finished& one : finished) {
    if (missing <= 0) break;
    if (gain(one) == 0) continue;
    missing -= gain(one);
    Reclaim(one.id);
  }
  return absl::OkStatus();
}

absl::Status SequenceRegistry::MakeRoom(const absl::Status& full, SequenceId spared) {
  if (store_.MakeRoom(full, spared).ok()) return absl::OkStatus();
  MutexLock lock(&mutex_);
  return EndFinished(full, spared);
}

absl::Status SequenceRegistry::BringUp(SequenceId id) {
  absl::Status up = store_.BringUp(id);
  for (int round = 0; round < kMaxBringUps && absl::IsResourceExhausted(up); ++round) {
    HW_RETURN_IF_ERROR(MakeRoom(up, /*spared=*/id));
    up = store_.BringUp(id);
  }
  return up;
}

void SequenceRegistry::BoundCount() {
  if (static_cast<int64_t>(records_.size()) < options_.max_sequences) return;
  const std::vector<Finished> finished = FinishedSequences();
  if (!finished.empty()) Reclaim(finished.front().id);
}

absl::Status SequenceRegistry::CheckCount() {
  const auto count = static_cast<int64_t>(records_.size());
  if (count < options_.max_sequences) return absl::OkStatus();
  if (!FinishedSequences().empty()) return absl::OkStatus();
  return ExhaustedError(absl::StrCat("there are ", count,
                                     " sequences, none of them finished; the "
                                     "limit is ",
                                     options_.max_sequences),
                        {.subject = "max_sequences",
                         .need = 1,
                         .limit = options_.max_sequences,
                         .retry_after = absl::Seconds(1)});
}

absl::Status SequenceRegistry::Unknown(SequenceId id, const Viewer& viewer) const {
  const auto reclaimed = reclaimed_.find(id);
  if (reclaimed != reclaimed_.end() && viewer.Sees(reclaimed->second)) {
    return absl::NotFoundError(
        absl::StrCat("sequence ", id, " had finished and was ended to make room for others"));
  }
  return absl::NotFoundError(absl::StrCat("sequence ", id, " is unknown or has ended"));
}

int64_t SequenceRegistry::snapshot_bytes() const { return *snapshot_bytes_; }

int64_t SequenceRegistry::num_reclaimed() const {
  MutexLock lock(&mutex_);
  return num_reclaimed_;
}

}  // namespace heavywater
