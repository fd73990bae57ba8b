#include "worker/rank/pivotal_history.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/pivotal.h"
#include "worker/cache/device_bytes.h"
#include "worker/cache/read_device.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {

void PivotalHistory::BeginPlan(int64_t queries) {
  queries_ += queries;
  plan_queries_ += queries;
  plans_.push_back(queries);
  while (plan_queries_ - plans_.front() >= window_) {
    plan_queries_ -= plans_.front();
    plans_.pop_front();
  }
}

int64_t PivotalHistory::ScoreOf(const Row& row) const {
  int64_t count = 0;
  for (const uint32_t of_plan : row.counts) count += of_plan;
  const double left =
      static_cast<double>(std::max<int64_t>(window_ - queries_, 0)) / static_cast<double>(window_);
  return count * kPivotalGain + std::llrint(static_cast<double>(row.at_prompt) * left);
}

void PivotalHistory::AddSet(int block, int set, std::span<const Position> positions,
                            std::span<const int64_t> counts, std::span<int64_t> scores) {
  HW_CHECK(counts.size() >= positions.size() && scores.size() >= positions.size());
  Rows& rows = rows_[int64_t{block} * num_sets_ + set];
  Rows residents;  // who is gone is forgotten
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i] == kNoPosition) continue;
    const auto known = rows.find(positions[i]);
    Row row =
        known == rows.end() ? Row{.at_prompt = scores[i], .counts = {}} : std::move(known->second);
    row.counts.push_back(static_cast<uint32_t>(counts[i] / kPivotalGain));
    while (row.counts.size() > plans_.size()) row.counts.pop_front();
    scores[i] = ScoreOf(row);
    residents.emplace(positions[i], std::move(row));
  }
  rows = std::move(residents);
}

absl::Status PivotalHistory::AddCounts(RankCache& cache, SequenceCache& sequence,
                                       const GainsRegion& region, DeviceSpan<int64_t> buffer) {
  BeginPlan(sequence.queries_since_plan());
  for (int block = 0; block < region.num_blocks(); ++block) {
    const int64_t used = region.used[block];
    HW_ASSIGN_OR_RETURN(const std::vector<int64_t> counts,
                        ReadDevice(DeviceSpan<const int64_t>(region.Own(buffer, block)),
                                   cache.backend(), cache.stream()));
    HW_ASSIGN_OR_RETURN(std::vector<int64_t> scores, sequence.ReadScores(block));
    const int64_t capacity = sequence.View(block).capacity;
    for (int set = 0; set < num_sets_; ++set) {
      AddSet(block, set, sequence.table(block, set).positions(),
             std::span(counts).subspan(set * used, used),
             std::span(scores).subspan(set * capacity, used));
    }
    HW_RETURN_IF_ERROR(cache.backend().CopyToDevice(DeviceBytes(sequence.View(block).scores),
                                                    std::as_bytes(std::span(scores)),
                                                    cache.stream()));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
