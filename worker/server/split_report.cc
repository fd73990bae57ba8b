#include "worker/server/split_report.h"

#include <algorithm>
#include <string>
#include <utility>

namespace heavywater {
namespace {

// A token takes at most 5 bytes; a position 5 and its score 10.
constexpr int kMaxTokens = 100'000;
constexpr int kMaxPositions = 32'000;
constexpr size_t kMaxSnapshotPart = size_t{512} << 10;

v1::PlanReport WithoutLists(const v1::PlanReport& report) {
  v1::PlanReport head;
  head.set_sequence_id(report.sequence_id());
  head.set_plan(report.plan());
  head.set_tokens_seen(report.tokens_seen());
  head.set_hash(report.hash());
  head.set_watermark(report.watermark());
  head.set_incarnation(report.incarnation());
  *head.mutable_dropped_ranges() = report.dropped_ranges();
  return head;
}

v1::ReportedSet PartOf(const v1::ReportedSet& set, int first, int count) {
  v1::ReportedSet part;
  part.set_layer(set.layer());
  part.set_kv_head(set.kv_head());
  part.set_first_index(first);
  part.set_num_positions(set.positions_size());
  part.mutable_positions()->Add(set.positions().begin() + first,
                                set.positions().begin() + first + count);
  if (set.scores().empty()) return part;
  part.mutable_scores()->Add(set.scores().begin() + first, set.scores().begin() + first + count);
  return part;
}

void AddTokenParts(const v1::PlanReport& report, std::vector<v1::PlanReport>* parts) {
  for (int first = 0; first < report.tokens_size(); first += kMaxTokens) {
    const int count = std::min(kMaxTokens, report.tokens_size() - first);
    v1::PlanReport part = WithoutLists(report);
    part.set_first_token(report.first_token() + first);
    part.mutable_tokens()->Add(report.tokens().begin() + first,
                               report.tokens().begin() + first + count);
    parts->push_back(std::move(part));
  }
}

void AddSetParts(const v1::PlanReport& report, size_t max_bytes,
                 std::vector<v1::PlanReport>* parts) {
  v1::PlanReport part = WithoutLists(report);
  size_t bytes = part.ByteSizeLong();
  for (const v1::ReportedSet& set : report.sets()) {
    int first = 0;
    do {
      const int count = std::min(kMaxPositions, set.positions_size() - first);
      v1::ReportedSet piece = PartOf(set, first, count);
      const size_t piece_bytes = piece.ByteSizeLong();
      if (part.sets_size() > 0 && bytes + piece_bytes > max_bytes) {
        parts->push_back(std::exchange(part, WithoutLists(report)));
        bytes = part.ByteSizeLong();
      }
      *part.add_sets() = std::move(piece);
      bytes += piece_bytes;
      first += count;
    } while (first < set.positions_size());
  }
  if (part.sets_size() > 0) parts->push_back(std::move(part));
}

void AddSnapshotParts(const v1::PlanReport& report, std::vector<v1::PlanReport>* parts) {
  const std::string& data = report.snapshot().data();
  for (size_t first = 0; first < data.size(); first += kMaxSnapshotPart) {
    v1::PlanReport part = WithoutLists(report);
    part.mutable_snapshot()->set_offset(static_cast<int64_t>(first));
    part.mutable_snapshot()->set_total_bytes(static_cast<int64_t>(data.size()));
    part.mutable_snapshot()->set_data(data.substr(first, kMaxSnapshotPart));
    parts->push_back(std::move(part));
  }
}

}  // namespace

std::vector<v1::PlanReport> SplitReport(const v1::PlanReport& report, size_t max_bytes) {
  if (report.ByteSizeLong() <= max_bytes) return {report};
  std::vector<v1::PlanReport> parts;
  AddTokenParts(report, &parts);
  // Before the sets, which complete the plan.
  AddSnapshotParts(report, &parts);
  AddSetParts(report, max_bytes, &parts);
  if (parts.empty()) return {report};
  parts.back().set_finished(report.finished());
  return parts;
}

}  // namespace heavywater
