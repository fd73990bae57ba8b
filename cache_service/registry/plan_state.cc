#include "cache_service/registry/plan_state.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/registry/validate.h"

namespace heavywater {
namespace {

// Plans that wait to be committed. A rank that falls this far behind makes the
// oldest ones uncommittable; later ones still commit.
constexpr size_t kMaxPendingPlans = 256;
// Likewise for what they hold together, but for the newest, which may be as large
// as its sequence is long.
constexpr size_t kMaxPendingBytes = size_t{64} << 20;
// The newest may have seen tokens that a client has not received yet: it goes on from
// the one before. Beside them the first: a sequence can go back to any token after it.
constexpr size_t kKeptSnapshots = 3;
constexpr int64_t kMaxSnapshotBytes = int64_t{64} << 20;

absl::Status CheckPart(const v1::ReportedSet& set, int64_t max_tokens) {
  HW_RETURN_IF_ERROR(CheckInt("sets.num_positions", set.num_positions(), 0, max_tokens));
  const bool whole = set.num_positions() == 0;
  const int64_t last = whole ? 0 : set.num_positions() - set.positions_size();
  if (last >= 0) return CheckInt("sets.first_index", set.first_index(), 0, last);
  return absl::InvalidArgumentError(absl::StrCat("sets.positions has ", set.positions_size(),
                                                 " values, want at most num_positions ",
                                                 set.num_positions()));
}

// One that does not go on where the part before it ended (which was lost) leaves
// the set incomplete; a replay from the first part on mends that.
void AddPart(const v1::ReportedSet& set, ResidentPositions& resident) {
  const auto first = static_cast<size_t>(set.first_index());
  // Before anything else: a set whose first part is missing is not whole.
  resident.num_positions =
      static_cast<size_t>(set.num_positions() == 0 ? set.positions_size() : set.num_positions());
  if (first > resident.positions.size()) return;
  resident.positions.resize(first);
  resident.scores.resize(first);
  if (first > 0 && !set.positions().empty() && set.positions(0) <= resident.positions.back()) {
    return;
  }
  resident.positions.insert(resident.positions.end(), set.positions().begin(),
                            set.positions().end());
  resident.scores.insert(resident.scores.end(), set.scores().begin(), set.scores().end());
  resident.scores.resize(resident.positions.size());
}

}  // namespace

size_t BytesOf(const ReportedPlan& plan) {
  size_t bytes = 0;
  for (const std::string& part : plan.snapshots) bytes += part.size();
  for (const TokenRanges& dropped : plan.dropped) bytes += dropped.size() * sizeof(TokenRange);
  for (const auto& [key, resident] : plan.sets) {
    bytes += resident.positions.size() * (sizeof(int32_t) + sizeof(int64_t));
  }
  return bytes;
}

PlanState::PlanState(const PlanLayout& layout) : layout_(layout), ranks_(layout.num_ranks) {}

absl::Status PlanState::ValidateSet(const v1::ReportedSet& set, int64_t tokens_seen) const {
  HW_RETURN_IF_ERROR(CheckInt("sets.layer", set.layer(), 0, layout_.num_layers - 1));
  const int first_head = layout_.per_kv_head ? 0 : -1;
  const int last_head = layout_.per_kv_head ? layout_.num_kv_heads - 1 : -1;
  HW_RETURN_IF_ERROR(CheckInt("sets.kv_head", set.kv_head(), first_head, last_head));
  if (set.scores_size() != 0 && set.scores_size() != set.positions_size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "sets.scores has ", set.scores_size(), " values, want ", set.positions_size(), " or none"));
  }
  HW_RETURN_IF_ERROR(CheckPart(set, layout_.max_tokens));
  int64_t next = 0;
  for (const int32_t position : set.positions()) {
    if (position < next || position >= tokens_seen) {
      return absl::InvalidArgumentError(
          absl::StrCat("sets.positions has ", position, " where at least ", next, " and below ",
                       tokens_seen, " is wanted (layer ", set.layer(), ")"));
    }
    next = int64_t{position} + 1;
  }
  return absl::OkStatus();
}

absl::Status PlanState::Validate(int rank, const v1::PlanReport& report) const {
  HW_RETURN_IF_ERROR(CheckInt("rank", rank, 0, layout_.num_ranks - 1));
  HW_RETURN_IF_ERROR(CheckInt("plan", report.plan(), 1, int64_t{1} << 40));
  HW_RETURN_IF_ERROR(CheckInt("tokens_seen", report.tokens_seen(), 1, layout_.max_tokens));
  HW_RETURN_IF_ERROR(CheckInt("watermark", report.watermark(), 0, layout_.max_tokens));
  HW_RETURN_IF_ERROR(
      CheckFlatRanges("dropped_ranges", report.dropped_ranges(), report.tokens_seen()));
  HW_RETURN_IF_ERROR(
      CheckInt("first_token", report.first_token(), 0, layout_.max_tokens - report.tokens_size()));
  // A negative one would also take ten bytes in a message, not five.
  for (const int32_t token : report.tokens()) {
    HW_RETURN_IF_ERROR(CheckInt("tokens", token, 0, std::numeric_limits<int32_t>::max()));
  }
  for (const v1::ReportedSet& set : report.sets()) {
    HW_RETURN_IF_ERROR(ValidateSet(set, report.tokens_seen()));
  }
  if (!report.has_snapshot()) return absl::OkStatus();
  const v1::SnapshotPart& part = report.snapshot();
  HW_RETURN_IF_ERROR(CheckInt("snapshot.total_bytes", part.total_bytes(), 1, kMaxSnapshotBytes));
  return CheckInt("snapshot.offset", part.offset(), 0,
                  part.total_bytes() - static_cast<int64_t>(part.data().size()));
}

// One that does not go on where the part before it ended leaves the snapshot
// incomplete; a replay from the first part on mends that.
void PlanState::AddSnapshot(int rank, const v1::SnapshotPart& part, ReportedPlan& plan) const {
  std::string& known = plan.snapshots[rank];
  const auto offset = static_cast<size_t>(part.offset());
  plan.snapshot_bytes[rank] = static_cast<size_t>(part.total_bytes());
  if (offset > known.size()) return;
  known.resize(offset);
  known += part.data();
}

void PlanState::AddTokens(const v1::PlanReport& report) {
  const int64_t known = static_cast<int64_t>(tokens_.size());
  // After a gap (a report was lost) the text cannot be continued.
  if (report.first_token() > known) return;
  const int64_t repeated = known - report.first_token();
  for (int64_t i = repeated; i < report.tokens_size(); ++i) tokens_.push_back(report.tokens(i));
}

void PlanState::CheckAgreement(const ReportedPlan& plan, int rank, const v1::PlanReport& report) {
  if (!agreement_.ok()) return;
  const auto disagree = [&](const char* what, auto first, auto second) {
    agreement_ = absl::FailedPreconditionError(absl::StrCat(
        "ranks disagree on plan ", plan.number, " of sequence ", layout_.sequence, ": ", what,
        " is ", first, " on rank ", plan.first_rank, " and ", second, " on rank ", rank));
  };
  if (plan.tokens_seen != report.tokens_seen()) {
    disagree("tokens_seen", plan.tokens_seen, report.tokens_seen());
  } else if (!layout_.per_kv_head && plan.hash != report.hash()) {
    disagree("hash", plan.hash, report.hash());
  }
}

void PlanState::Apply(int rank, const v1::PlanReport& report) {
  Rank& state = ranks_[rank];
  state.watermark = std::max(state.watermark, report.watermark());
  state.finished |= report.finished();
  AddTokens(report);
  if (report.plan() < state.last_plan) return;
  state.last_plan = report.plan();
  if (committed_ != nullptr && report.plan() <= committed_->number) return;

  const auto [entry, added] = pending_.try_emplace(report.plan());
  ReportedPlan& plan = entry->second;
  if (added) {
    plan.number = report.plan();
    plan.tokens_seen = report.tokens_seen();
    plan.hash = report.hash();
    plan.first_rank = rank;
    plan.reported.resize(layout_.num_ranks);
    plan.dropped.resize(layout_.num_ranks);
    plan.snapshots.resize(layout_.num_ranks);
    plan.snapshot_bytes.resize(layout_.num_ranks);
  }
  CheckAgreement(plan, rank, report);
  plan.reported[rank] = true;
  plan.dropped[rank] = FromFlat(report.dropped_ranges());
  for (const v1::ReportedSet& set : report.sets()) {
    ResidentPositions& resident = plan.sets[{set.layer(), set.kv_head()}];
    AddPart(set, resident);
    resident.rank = rank;
  }
  if (report.has_snapshot()) AddSnapshot(rank, report.snapshot(), plan);
  plan.bytes = BytesOf(plan);
  BoundPending();
}

void PlanState::BoundPending() {
  size_t bytes = 0;
  for (const auto& [number, plan] : pending_) bytes += plan.bytes;
  while (pending_.size() > kMaxPendingPlans || (bytes > kMaxPendingBytes && pending_.size() > 1)) {
    bytes -= pending_.begin()->second.bytes;
    pending_.erase(pending_.begin());
  }
}

bool PlanState::IsComplete(const ReportedPlan& plan) const {
  // Its reports may come in parts, the last of them for a snapshot.
  for (int rank = 0; rank < layout_.num_ranks; ++rank) {
    if (plan.snapshots[rank].size() < plan.snapshot_bytes[rank]) return false;
  }
  const int num_sets = layout_.num_layers * (layout_.per_kv_head ? layout_.num_kv_heads : 1);
  return static_cast<int>(plan.sets.size()) == num_sets &&
         std::all_of(plan.reported.begin(), plan.reported.end(), [](bool is) { return is; }) &&
         std::all_of(plan.sets.begin(), plan.sets.end(),
                     [](const auto& item) { return item.second.whole(); });
}

// What a rank has given up will never be written: it holds nothing back.
bool PlanState::IsStored(const ReportedPlan& plan, const std::vector<int64_t>& watermarks) {
  for (size_t rank = 0; rank < watermarks.size(); ++rank) {
    if (watermarks[rank] >= plan.tokens_seen) continue;
    const TokenRanges missing = {{watermarks[rank], plan.tokens_seen}};
    if (!Subtract(missing, plan.dropped[rank]).empty()) return false;
  }
  return true;
}

void PlanState::Advance(const Watermarks& watermark, uint64_t order) {
  if (!agreement_.ok() || pending_.empty()) return;
  std::vector<int64_t> watermarks;
  for (int rank = 0; rank < layout_.num_ranks; ++rank) {
    // Pages may arrive long after the report of the plan that they belong to.
    watermarks.push_back(watermark(rank).value_or(ranks_[rank].watermark));
  }
  TakeSnapshots(watermarks, order);
  const auto last = std::find_if(pending_.rbegin(), pending_.rend(), [&](const auto& item) {
    return IsComplete(item.second) && IsStored(item.second, watermarks);
  });
  if (last == pending_.rend()) return;
  const auto committed = std::prev(last.base());
  committed_ = std::make_shared<const ReportedPlan>(std::move(committed->second));
  pending_.erase(pending_.begin(), std::next(committed));
}

// All of it in host memory, on every rank: nothing given up.
bool PlanState::IsRestorable(const ReportedPlan& plan) const {
  for (int rank = 0; rank < layout_.num_ranks; ++rank) {
    if (!plan.reported[rank] || !plan.dropped[rank].empty()) return false;
    if (plan.snapshot_bytes[rank] == 0) return false;
    if (plan.snapshots[rank].size() != plan.snapshot_bytes[rank]) return false;
  }
  return true;
}

void PlanState::TakeSnapshots(const std::vector<int64_t>& watermarks, uint64_t order) {
  for (auto& [number, plan] : pending_) {
    if (!IsRestorable(plan) || !IsStored(plan, watermarks)) continue;
    if (!snapshots_.empty() && number <= snapshots_.back()->plan) continue;
    CommittedSnapshot snapshot = {.plan = number, .tokens_seen = plan.tokens_seen, .order = order};
    snapshot.parts = std::exchange(plan.snapshots, std::vector<std::string>(layout_.num_ranks));
    plan.snapshot_bytes.assign(layout_.num_ranks, 0);
    plan.bytes = BytesOf(plan);
    KeepSnapshot(std::move(snapshot));
    if (snapshots_.size() > kKeptSnapshots) snapshots_.erase(std::next(snapshots_.begin()));
  }
}

int64_t CommittedSnapshot::bytes() const {
  int64_t bytes = 0;
  for (const std::string& part : parts) bytes += static_cast<int64_t>(part.size());
  return bytes;
}

void PlanState::KeepSnapshot(CommittedSnapshot snapshot) {
  const std::shared_ptr<std::atomic<int64_t>> gauge = layout_.snapshot_gauge;
  if (gauge != nullptr) *gauge += snapshot.bytes();
  snapshots_.emplace_back(new CommittedSnapshot(std::move(snapshot)),
                          [gauge](const CommittedSnapshot* gone) {
                            if (gauge != nullptr) *gauge -= gone->bytes();
                            delete gone;
                          });
}

std::shared_ptr<const CommittedSnapshot> PlanState::oldest_snapshot() const {
  return snapshots_.empty() ? nullptr : snapshots_.front();
}

void PlanState::DropOldestSnapshot() {
  if (!snapshots_.empty()) snapshots_.pop_front();
}

std::shared_ptr<const CommittedSnapshot> PlanState::FindSnapshot(int64_t max_tokens_seen) const {
  for (auto snapshot = snapshots_.rbegin(); snapshot != snapshots_.rend(); ++snapshot) {
    if ((*snapshot)->tokens_seen <= max_tokens_seen) return *snapshot;
  }
  return nullptr;
}

std::shared_ptr<const CommittedSnapshot> PlanState::SnapshotOfPlan(int64_t plan) const {
  for (const auto& snapshot : snapshots_) {
    if (snapshot->plan == plan) return snapshot;
  }
  return nullptr;
}

void PlanState::Truncate(int64_t plan, int64_t num_tokens) {
  // What some ranks have reported and others have not may come again otherwise numbered.
  pending_.clear();
  while (!snapshots_.empty() && snapshots_.back()->plan > plan) snapshots_.pop_back();
  // Later plans, and the tokens that nobody has received, may come again as others.
  if (committed_ != nullptr && committed_->number > plan) committed_ = nullptr;
  if (static_cast<int64_t>(tokens_.size()) > num_tokens) {
    tokens_.resize(static_cast<size_t>(num_tokens));
  }
  for (Rank& rank : ranks_) rank.watermark = std::min(rank.watermark, num_tokens);
}

void PlanState::GoBackTo(int64_t plan, int64_t num_tokens) {
  Truncate(plan, num_tokens);
  for (Rank& rank : ranks_) {
    rank.last_plan = plan;
    rank.finished = false;
  }
}

PlanState PlanState::ForkedAs(SequenceId sequence) const {
  PlanState forked = *this;
  forked.layout_.sequence = sequence;
  forked.pending_.clear();
  for (Rank& rank : forked.ranks_) rank.finished = true;
  return forked;
}

int64_t PlanState::first_dropped() const {
  int64_t first = std::numeric_limits<int64_t>::max();
  const auto look = [&first](const ReportedPlan& plan) {
    for (const TokenRanges& dropped : plan.dropped) {
      if (!dropped.empty()) first = std::min(first, dropped.front().begin);
    }
  };
  if (committed_ != nullptr) look(*committed_);
  for (const auto& [number, plan] : pending_) look(plan);
  return first;
}

bool PlanState::all_finished() const {
  return std::all_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) { return rank.finished; });
}

}  // namespace heavywater
