// What must hold after every step.
#include <algorithm>
#include <cstring>
#include <set>

#include "absl/strings/str_cat.h"
#include "cache_service/base/bfloat16.h"
#include "tests/sim/rank_simulation.h"
#include "worker/rank/plan_hash.h"

namespace heavywater {
namespace {

// Probabilities of the plain reference may round the other way, once per query
// and head.
constexpr int64_t kTolerance = 4000;

std::vector<std::byte> Stored(std::span<const float> k, std::span<const float> v, KvDtype dtype) {
  std::vector<std::byte> bytes;
  for (std::span<const float> half : {k, v}) {
    for (float value : half) {
      const uint16_t rounded = FloatToBFloat16(value);
      const auto* from = dtype == KvDtype::kFloat32 ? reinterpret_cast<const std::byte*>(&value)
                                                    : reinterpret_cast<const std::byte*>(&rounded);
      bytes.insert(bytes.end(), from, from + ElementBytes(dtype));
    }
  }
  return bytes;
}

bool Contains(std::span<const PositionRange> ranges, Position position) {
  return std::any_of(ranges.begin(), ranges.end(), [position](const PositionRange& range) {
    return position >= range.begin && position < range.end;
  });
}

}  // namespace

std::string RankSimulation::CheckAll() {
  for (const auto& [id, sequence] : sequences_) {
    const std::string wrong = CheckSequence(id, sequence);
    if (!wrong.empty()) return absl::StrCat("sequence ", id, ": ", wrong);
  }
  return CheckMemory();
}

std::string RankSimulation::CheckSequence(SequenceId id, const Sequence& sequence) {
  std::string wrong = sequence.plain->Compare(*group_, id, kTolerance);
  for (int rank = 0; rank < group_->world_size() && wrong.empty(); ++rank) {
    wrong = CheckRank(rank, id, sequence);
    if (!wrong.empty()) wrong = absl::StrCat("rank ", rank, ": ", wrong);
  }
  return wrong;
}

std::string RankSimulation::CheckRank(int rank, SequenceId id, const Sequence& sequence) {
  const PlanReport report = *group_->cache(rank).Report(id, /*with_sets=*/true);
  const SequenceStats stats = *group_->cache(rank).Stats(id);
  if (report.tokens_seen != sequence.plain->tokens_seen()) {
    return absl::StrCat("tokens_seen is ", report.tokens_seen);
  }
  if (stats.tokens_resident + stats.tokens_demoted + stats.tokens_dropped != stats.tokens_seen) {
    return "resident, demoted and dropped do not add up";
  }
  const Budget& budget = stats.budget;
  if (budget.bounded_decode && sequence.planned && stats.plans > 0 &&
      stats.tokens_resident > budget.budget_tokens) {
    return absl::StrCat(stats.tokens_resident, " resident after a plan, budget is ",
                        budget.budget_tokens);
  }
  PlanHash hash;
  for (const ResidentSet& set : report.sets) {
    for (Position p : set.positions) AddResident(set.layer, set.kv_head + 1, 0, p, hash);
  }
  if (report.hash != hash.positions) return "its plan hash is not that of its sets";
  if (report.scope == Scope::kLayer && report.hash != group_->cache(0).Report(id, false)->hash) {
    return "its plan hash is not rank 0's";
  }
  for (const ResidentSet& set : report.sets) {
    const std::string wrong = CheckSet(rank, id, sequence, report, set);
    if (!wrong.empty()) return wrong;
  }
  counts_.dropped += stats.tokens_dropped;
  return "";
}

// Each position is in exactly one of the three states, and what counts as
// demoted can be read.
std::string RankSimulation::CheckSet(int rank, SequenceId id, const Sequence& sequence,
                                     const PlanReport& report, const ResidentSet& set) {
  const std::set<Position> resident(set.positions.begin(), set.positions.end());
  if (static_cast<int64_t>(resident.size()) != report.tokens_resident) {
    return absl::StrCat(resident.size(), " positions in a set, reported ", report.tokens_resident);
  }
  const KvShape shape = TestShape(group_->options(), rank);
  const bool writes = rank % group_->cache(rank).options().ranks_per_kv_head() == 0;
  for (Position p = 0; p < report.tokens_seen && !tiers_.empty() && writes; ++p) {
    if (resident.contains(p) || Contains(report.unbacked, p)) continue;
    for (int head = 0; head < shape.num_kv_heads; ++head) {
      const int model_head = shape.first_kv_head + head;
      if (set.kv_head >= 0 && set.kv_head != model_head) continue;
      const std::string wrong = CheckHostRow(rank, id, sequence, set.layer, model_head, p);
      if (!wrong.empty()) return wrong;
    }
  }
  return "";
}

std::string RankSimulation::CheckHostRow(int rank, SequenceId id, const Sequence& sequence,
                                         int layer, int kv_head, Position position) {
  const KvShape shape = TestShape(group_->options(), rank);
  const std::byte* page = tiers_[rank].Page(id, layer, kv_head, position / shape.page_tokens);
  if (page == nullptr) return absl::StrCat("demoted position ", position, " has no page");
  if (tiers_[rank].watermark(id) <= position) {
    return absl::StrCat("demoted position ", position, " is above the watermark");
  }
  const SyntheticRow row = group_->Rows(layer, TestTokens(sequence.tag, 1, position), position);
  const size_t first = static_cast<size_t>(kv_head) * shape.head_dim;
  const std::vector<std::byte> want =
      Stored(std::span(row.k).subspan(first, shape.head_dim),
             std::span(row.v).subspan(first, shape.head_dim), shape.dtype);
  ++counts_.demoted_rows;
  const std::byte* got = page + position % shape.page_tokens * shape.row_bytes();
  if (std::memcmp(got, want.data(), want.size()) == 0) return "";
  return absl::StrCat("bytes of demoted position ", position, " in layer ", layer, ", KV head ",
                      kv_head, " are not those appended");
}

std::string RankSimulation::CheckMemory() {
  for (int rank = 0; rank < group_->world_size(); ++rank) {
    int64_t device_bytes = 0;
    int64_t host_bytes = 0;
    for (const auto& [id, sequence] : sequences_) {
      const SequenceStats stats = *group_->cache(rank).Stats(id);
      device_bytes += stats.device_bytes;
      host_bytes += stats.host_bytes;
    }
    const DeviceMemory& memory = group_->cache(rank).memory();
    if (memory.kv_gauge().current_bytes != device_bytes) {
      return absl::StrCat("rank ", rank, " holds ", memory.kv_gauge().current_bytes,
                          " KV bytes, its sequences ", device_bytes);
    }
    if (memory.limit_bytes() != 0 && memory.reserved_bytes() > memory.limit_bytes()) {
      return absl::StrCat("rank ", rank, " reserves more than its limit");
    }
    if (!tiers_.empty() && tiers_[rank].reserved_bytes() != host_bytes) {
      return absl::StrCat("rank ", rank, "'s tier holds ", tiers_[rank].reserved_bytes(),
                          " bytes, its sequences ", host_bytes);
    }
  }
  return "";
}

std::string RankSimulation::CheckEmpty() {
  const std::string wrong = CheckMemory();
  if (!wrong.empty()) return wrong;
  for (int rank = 0; rank < group_->world_size(); ++rank) {
    const int64_t reserved = group_->cache(rank).memory().reserved_bytes();
    if (reserved == idle_bytes_[rank]) continue;
    return absl::StrCat("rank ", rank, " reserves ", reserved, " bytes without sequences, want ",
                        idle_bytes_[rank]);
  }
  return "";
}

}  // namespace heavywater
