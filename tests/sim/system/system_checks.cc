// What must hold after every step.
#include <algorithm>
#include <cstring>
#include <set>

#include "absl/strings/str_cat.h"
#include "tests/sim/system/system_simulation.h"
#include "worker/rank/plan_hash.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

// Probabilities of the plain reference may round the other way, once per query and head.
constexpr int64_t kTolerance = 8000;

bool Contains(std::span<const PositionRange> ranges, int64_t position) {
  return std::any_of(ranges.begin(), ranges.end(), [position](const PositionRange& range) {
    return position >= range.begin && position < range.end;
  });
}

}  // namespace

std::string SystemSimulation::CheckAll() {
  std::string wrong = wrong_;
  if (formed()) {
    for (const auto& talk : talks_) {
      if (!wrong.empty() || talk->where != Talk::Where::kRunning) continue;
      wrong = CheckRunning(*talk);
      if (!wrong.empty()) wrong = absl::StrCat("sequence ", talk->id, ": ", wrong);
    }
    if (wrong.empty()) wrong = CheckMemory();
  }
  if (wrong.empty() && service_.up()) wrong = CheckTiers();
  if (!wrong.empty() || !service_.up() || talks_.empty()) return wrong;
  Talk& talk = *talks_[world_.random() % talks_.size()];
  if (talk.id == 0 || talk.where == Talk::Where::kGone) return "";
  try {
    wrong = CheckAtService(talk);
  } catch (const SimProcessEnded&) {  // a read brings pages up, too
    service_.CrashIfDue();
  }
  return wrong.empty() ? "" : absl::StrCat("sequence ", talk.id, " at the service: ", wrong);
}

std::string SystemSimulation::CheckRunning(Talk& talk) {
  std::vector<PlanReport> reports;
  for (int rank = 0; rank < size(); ++rank) {
    auto report = group_->cache(rank).Report(talk.id, /*with_sets=*/true);
    if (!report.ok()) return report.status().ToString();
    reports.push_back(*std::move(report));
    const std::string wrong = CheckRank(talk, rank, reports.back());
    if (!wrong.empty()) return absl::StrCat("rank ", rank, ": ", wrong);
    if (reports[0].scope == Scope::kLayer && reports.back().hash != reports[0].hash) {
      return absl::StrCat("the plan hash of rank ", rank, " is not rank 0's");
    }
  }
  std::string wrong = CheckReference(talk, reports);
  return wrong.empty() ? CheckDigest(talk, reports) : wrong;
}

std::string SystemSimulation::CheckRank(const Talk& talk, int rank, const PlanReport& report) {
  const SequenceStats stats = *group_->cache(rank).Stats(talk.id);
  if (report.tokens_seen != talk.tokens_seen) {
    return absl::StrCat("tokens_seen is ", report.tokens_seen, ", want ", talk.tokens_seen);
  }
  if (stats.tokens_resident + stats.tokens_demoted + stats.tokens_dropped != stats.tokens_seen) {
    return "resident, demoted and dropped do not add up";
  }
  const SequenceCache& sequence = **group_->cache(rank).Find(talk.id);
  if (stats.budget.bounded_decode && sequence.queries_since_plan() == 0 && stats.plans > 0 &&
      stats.tokens_resident > stats.budget.budget_tokens) {
    return absl::StrCat(stats.tokens_resident, " resident after a plan, budget is ",
                        stats.budget.budget_tokens);
  }
  PlanHash hash;
  for (const ResidentSet& set : report.sets) {
    for (const Position p : set.positions) AddResident(set.layer, set.kv_head + 1, 0, p, hash);
    if (static_cast<int64_t>(set.positions.size()) != report.tokens_resident) {
      return absl::StrCat(set.positions.size(), " positions in a set, reported ",
                          report.tokens_resident);
    }
  }
  if (report.hash != hash.positions) return "its plan hash is not that of its sets";
  return CheckRows(talk, rank, report);
}

// Every position is in host memory, bit for bit, or counts as one that is not.
std::string SystemSimulation::CheckRows(const Talk& talk, int rank, const PlanReport& report) {
  const KvShape shape = TestShape(group_options_, rank);
  if (rank % group_->cache(rank).options().ranks_per_kv_head() != 0) return "";
  const auto row_bytes = static_cast<size_t>(shape.row_bytes());
  for (int64_t begin = 0; begin < talk.tokens_seen; begin += shape.page_tokens) {
    if (Contains(report.unbacked, begin)) continue;  // a page has all of its rows, or none
    const int64_t rows = std::min<int64_t>(shape.page_tokens, talk.tokens_seen - begin);
    for (int i = 0; i < shape.num_layers * shape.num_kv_heads; ++i) {
      const int layer = i / shape.num_kv_heads;
      const int head = shape.first_kv_head + i % shape.num_kv_heads;
      const std::byte* const page =
          processes_[rank]->tier().Peek(talk.id, layer, head, begin / shape.page_tokens);
      if (page == nullptr) return absl::StrCat("position ", begin, " has no page");
      const std::vector<std::byte>& want =
          talk.rows[static_cast<size_t>(layer * group_options_.kv_heads + head)];
      if (std::memcmp(page, want.data() + static_cast<size_t>(begin) * row_bytes,
                      static_cast<size_t>(rows) * row_bytes) == 0) {
        continue;
      }
      return absl::StrCat("bytes of positions from ", begin, " on, in layer ", layer, ", KV head ",
                          head, ", are not those appended");
    }
  }
  return "";
}

std::string SystemSimulation::CheckReference(Talk& talk, const std::vector<PlanReport>& reports) {
  if (talk.plain == nullptr) return "";
  for (const PlanReport& report : reports) {
    for (const ResidentSet& set : report.sets) {
      const std::vector<Ledger>& sets = talk.plain->layer(set.layer).sets();
      const Ledger& want = sets[sets.size() == 1 ? 0 : static_cast<size_t>(set.kv_head)];
      bool same = want.size() == set.positions.size();
      for (size_t i = 0; same && i < set.positions.size(); ++i) {
        const auto found = want.find(set.positions[i]);
        same = found != want.end();
        if (same && std::abs(found->second - set.scores[i]) > kTolerance) {
          return absl::StrCat("layer ", set.layer, ": score of position ", set.positions[i], " is ",
                              set.scores[i], ", want ", found->second);
        }
      }
      if (same) continue;
      if (talk.plain->CountDifferentNearTheCut(*group_, talk.id) < 0) {
        return absl::StrCat("layer ", set.layer, ": the kept positions are not the reference's");
      }
      world_.trace.Note("the reference parts at a tie", talk.id);
      talk.plain = nullptr;
      return "";
    }
  }
  if (!talk.fresh) return "";
  for (int layer = 0; layer < group_options_.num_layers; ++layer) {
    const std::string wrong = talk.plain->CompareAttention(*group_, layer);
    if (!wrong.empty()) return absl::StrCat("layer ", layer, ": ", wrong);
  }
  return "";
}

uint64_t SystemSimulation::SetsHash(const std::vector<PlanReport>& reports) const {
  PlanHash hash;
  std::set<std::pair<int, int>> seen;  // ranks of scope layer report the same
  for (const PlanReport& report : reports) {
    for (const ResidentSet& set : report.sets) {
      if (!seen.emplace(set.layer, set.kv_head).second) continue;
      for (const Position p : set.positions) AddResident(set.layer, set.kv_head + 1, 0, p, hash);
    }
  }
  return hash.positions;
}

// After a restore the same tokens, in the same steps, give the same again.
std::string SystemSimulation::CheckDigest(Talk& talk, const std::vector<PlanReport>& reports) {
  bool complete = true;
  Digest digest;
  for (const PlanReport& report : reports) {
    complete = complete && report.unbacked.empty();
    for (const ResidentSet& set : report.sets) {
      for (size_t i = 0; i < set.positions.size(); ++i) {
        digest.Add(static_cast<uint64_t>(set.positions[i]));
        digest.Add(static_cast<uint64_t>(set.scores[i]));
      }
    }
  }
  if (!complete) {
    talk.whole = false;
    talk.digests.erase(talk.digests.lower_bound(talk.tokens_seen), talk.digests.end());
    return "";
  }
  const auto [known, added] = talk.digests.try_emplace(talk.tokens_seen, digest.value());
  if (added) return "";
  if (known->second != digest.value()) {
    return absl::StrCat(
        "with ", talk.tokens_seen,
        " tokens its sets and scores are not what they were before it was restored");
  }
  if (!talk.fresh) return "";
  world_.trace.Note("the same again", talk.id, static_cast<uint64_t>(talk.tokens_seen));
  return "";
}

std::string SystemSimulation::CheckMemory() {
  for (int rank = 0; rank < size(); ++rank) {
    int64_t device_bytes = 0;
    for (const auto& talk : talks_) {
      if (talk->where != Talk::Where::kRunning) continue;
      device_bytes += group_->cache(rank).Stats(talk->id)->device_bytes;
    }
    const DeviceMemory& memory = group_->cache(rank).memory();
    if (memory.kv_gauge().current_bytes != device_bytes) {
      return absl::StrCat("rank ", rank, " holds ", memory.kv_gauge().current_bytes,
                          " KV bytes, its sequences ", device_bytes);
    }
    if (memory.limit_bytes() != 0 && memory.reserved_bytes() > memory.limit_bytes()) {
      return absl::StrCat("rank ", rank, " reserves more than its limit");
    }
  }
  return "";
}

std::string SystemSimulation::CheckTiers() {
  const PageStoreStats stats = service_.store().Stats();
  if (stats.free_bytes + stats.used_bytes != stats.total_bytes) return "host memory: free + used";
  if (stats.promised_bytes < 0 || stats.promised_bytes > stats.free_bytes) {
    return absl::StrCat("host memory: ", stats.promised_bytes, " bytes promised of ",
                        stats.free_bytes, " free");
  }
  if (stats.retiring_bytes < 0 || stats.retiring_bytes > stats.used_bytes || stats.pages < 0) {
    return absl::StrCat("host memory: ", stats.retiring_bytes, " bytes retiring, ", stats.pages,
                        " pages, ", stats.used_bytes, " bytes used");
  }
  for (const TierStats& tier : stats.below) {
    if (tier.free_bytes + tier.used_bytes != tier.total_bytes || tier.used_bytes < 0 ||
        tier.pages < 0) {
      return absl::StrCat("tier ", tier.tier, ": ", tier.used_bytes, " bytes used, ",
                          tier.free_bytes, " free of ", tier.total_bytes);
    }
  }
  if (service_.sequences().num_disagreements() != 0) return "ranks have disagreed at the service";
  if (service_.sequences().snapshot_bytes() < 0) return "fewer than no bytes of committed states";
  return "";
}

std::string SystemSimulation::CheckAtService(Talk& talk) {
  const auto sequence = service_.sequences().Get(talk.id);
  if (!sequence.ok()) return "";  // its lease has ended, or it made room
  const int64_t committed = sequence->committed_tokens();
  if (sequence->num_tokens() > static_cast<int64_t>(talk.text.size()) &&
      talk.where != Talk::Where::kEnded) {
    return absl::StrCat("it has ", sequence->num_tokens(), " tokens of ", talk.text.size());
  }
  v1::GetSetsRequest request;
  request.set_sequence_id(talk.id);
  const auto sets = service_.sequences().GetSets(request);
  if (!sets.ok()) return sets.status().ToString();
  if (!sets->empty()) {
    PlanHash hash;
    for (const v1::SequenceSet& set : *sets) {
      for (const auto* positions : {&set.sinks(), &set.heavy(), &set.recent()}) {
        for (const int64_t p : *positions) {
          AddResident(set.layer(), set.kv_head() + 1, 0, static_cast<Position>(p), hash);
        }
      }
    }
    const auto reported = talk.sets_of_plan.find(sets->front().plan());
    if (reported == talk.sets_of_plan.end()) {
      return absl::StrCat("plan ", sets->front().plan(), " is committed, which was never reported");
    }
    if (reported->second != hash.positions) {
      return absl::StrCat("the sets of committed plan ", sets->front().plan(),
                          " are not those reported: ", sets->front().ShortDebugString());
    }
  }
  return CheckStoredRow(talk, committed);
}

// A row of what is committed reads as it was written, from whatever tier.
std::string SystemSimulation::CheckStoredRow(Talk& talk, int64_t committed) {
  const KvShape shape = TestShape(group_options_, 0);
  const auto row_bytes = static_cast<int64_t>(shape.row_bytes());
  const int64_t known =
      talk.rows.empty() ? 0 : static_cast<int64_t>(talk.rows[0].size()) / row_bytes;
  const int64_t end = std::min(committed, known);
  if (end == 0) return "";
  const auto position = static_cast<int64_t>(world_.random() % static_cast<uint64_t>(end));
  const RowRange rows = {.sequence = talk.id,
                         .layer = world_.Between(0, group_options_.num_layers - 1),
                         .kv_head = world_.Between(0, group_options_.kv_heads - 1),
                         .first_position = position,
                         .num_positions = 1};
  std::vector<std::byte> bytes(static_cast<size_t>(row_bytes));
  const absl::Status read = service_.store().Read(rows, bytes);
  if (!read.ok()) {
    world_.trace.Note(absl::StrCat("read: ", absl::StatusCodeToString(read.code())), talk.id);
    const bool away =
        absl::IsUnavailable(read) && (!service_.disk.reachable || !service_.remote.reachable);
    const bool given_up = absl::IsNotFound(read) || absl::IsOutOfRange(read);
    if (away || damaged_ || (given_up && !talk.whole)) return "";
    return absl::StrCat("a committed row cannot be read: ", read.ToString());
  }
  const std::vector<std::byte>& want =
      talk.rows[static_cast<size_t>(rows.layer * group_options_.kv_heads + rows.kv_head)];
  if (std::memcmp(bytes.data(), want.data() + position * row_bytes, bytes.size()) == 0) return "";
  return absl::StrCat("row ", position, " of layer ", rows.layer, ", KV head ", rows.kv_head,
                      " is not what was written");
}

}  // namespace heavywater
