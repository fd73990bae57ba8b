// How a run ends: what is kept can go down and come back, and nothing is left in the end.
#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/tier/stored_page.h"
#include "tests/sim/system/system_simulation.h"

namespace heavywater {

// All faults end, all sequences too: nothing is left anywhere.
std::string SystemSimulation::CleanUp() {
  faults_ = false;
  Heal();
  for (int i = 0; i < 200 && !(formed() && service_.up()); ++i) {
    if (std::string wrong = PassTime(absl::Milliseconds(100)); !wrong.empty()) return wrong;
  }
  if (!formed()) return "the group does not form again";
  if (std::string wrong = CheckAll(); !wrong.empty()) return wrong;
  for (const auto& talk : talks_) {
    if (talk->where == Talk::Where::kRunning) CloseOnRanks(*talk);
  }
  if (std::string wrong = CheckKept(); !wrong.empty()) return wrong;
  // Leases, the grace for writers, and what was suspended.
  for (int i = 0; i < 500; ++i) {
    if (std::string wrong = PassTime(absl::Milliseconds(100)); !wrong.empty()) return wrong;
    service_.Background(20);
  }
  return CheckEmpty();
}

// Once no process that was replaced may write any more.
std::string SystemSimulation::CheckKept() {
  for (int i = 0; i < 200; ++i) {
    if (std::string wrong = PassTime(absl::Milliseconds(100)); !wrong.empty()) return wrong;
    service_.Background(20);
  }
  for (const auto& talk : talks_) {
    if (talk->where != Talk::Where::kEnded) continue;
    std::string wrong = CheckMayLeave(*talk);
    if (wrong.empty()) wrong = CheckGoesOn(*talk);
    if (!wrong.empty()) return absl::StrCat("sequence ", talk->id, ": ", wrong);
    if (talk->where == Talk::Where::kRunning) CloseOnRanks(*talk);
  }
  return "";
}

// Nobody reads or writes the pages of a sequence that has ended or was suspended.
std::string SystemSimulation::CheckMayLeave(const Talk& talk) {
  if (damaged_ || service_.options().disk_bytes == 0) return "";
  if (!service_.sequences().Get(talk.id).ok()) return "";
  OrderedPageStore& store = service_.store();
  // A tier that was full a moment ago is not asked again at once.
  for (int i = 0; i < 60 && store.HostBytes(talk.id) > 0; ++i) {
    while (store.FlushBatch(talk.id) > 0) {
    }
    if (std::string wrong = PassTime(absl::Milliseconds(100)); !wrong.empty()) return wrong;
  }
  const int64_t pages = store.HostBytes(talk.id) / Slab::RoundUp(1);
  const auto row_bytes = static_cast<int64_t>(TestShape(group_options_, 0).row_bytes());
  for (const TierStats& tier : store.Stats().below) {
    if (pages == 0 ||
        tier.free_bytes < pages * StoredBytes(group_options_.page_tokens * row_bytes)) {
      continue;
    }
    return absl::StrCat(pages, " pages cannot leave host memory, though tier ", tier.tier, " has ",
                        tier.free_bytes, " bytes free");
  }
  return "";
}

// What was suspended whole goes on, unless there is no room for it.
std::string SystemSimulation::CheckGoesOn(Talk& talk) {
  const auto sequence = service_.sequences().Get(talk.id);
  const bool kept = sequence.ok() && sequence->suspended() && talk.whole && !damaged_;
  // Ranks that do not read the slab, or not yet, compute it anew.
  const auto reads = [&](const auto& process) {
    return process->tier().attached() && process->link().epoch() == rank_zero().link().epoch();
  };
  const bool all_read =
      service_.options().maps_slab && std::all_of(processes_.begin(), processes_.end(), reads);
  if (!kept || !all_read || talk.tokens_seen < talk.options.prompt_tokens) return "";
  talk.text.push_back(talk.TokenAt(static_cast<int64_t>(talk.text.size())));
  talk.options.max_tokens =
      std::max(talk.options.max_tokens, static_cast<int64_t>(talk.text.size()) + 1);
  const SequenceId before = talk.id;
  std::string wrong = Reopen(talk, /*turn=*/true, /*cancelled=*/false);
  if (wrong.empty() && talk.id != before) wrong = "it was whole, and has been computed anew";
  return wrong;
}

std::string SystemSimulation::CheckEmpty() {
  const PageStoreStats stats = service_.store().Stats();
  if (service_.sequences().num_sequences() != 0) {
    return absl::StrCat(service_.sequences().num_sequences(), " sequences are left");
  }
  if (stats.used_bytes != 0 || stats.promised_bytes != 0 || stats.retiring_bytes != 0 ||
      stats.pages != 0) {
    return absl::StrCat("host memory is left: ", stats.used_bytes, " bytes used, ",
                        stats.promised_bytes, " promised, ", stats.retiring_bytes, " retiring, ",
                        stats.pages, " pages");
  }
  for (const TierStats& tier : stats.below) {
    if (tier.used_bytes == 0) continue;
    return absl::StrCat(tier.used_bytes, " bytes are left in tier ", tier.tier);
  }
  if (!service_.disk.pages.empty() || !service_.remote.pages.empty()) {
    return absl::StrCat(service_.disk.pages.size(), " pages are left on disk, ",
                        service_.remote.pages.size(), " remote");
  }
  if (service_.sequences().snapshot_bytes() != 0) return "bytes of committed states are left";
  for (int rank = 0; rank < size(); ++rank) {
    if (processes_[rank]->tier().reserved_bytes() != 0) {
      return absl::StrCat("rank ", rank, "'s tier holds pages of no sequence");
    }
    const int64_t reserved = group_->cache(rank).memory().reserved_bytes();
    if (reserved == idle_bytes_[rank]) continue;
    return absl::StrCat("rank ", rank, " reserves ", reserved, " bytes without sequences, want ",
                        idle_bytes_[rank]);
  }
  return "";
}

}  // namespace heavywater
