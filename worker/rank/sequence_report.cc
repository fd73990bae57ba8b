// What a SequenceCache tells about itself.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

// Positions of `ranges` that are not in `table`.
int64_t CountMissing(const SlotTable& table, std::span<const PositionRange> ranges) {
  int64_t missing = 0;
  for (const PositionRange& range : ranges) missing += range.end - range.begin;
  for (Position position : table.positions()) {
    const bool unbacked = std::any_of(ranges.begin(), ranges.end(), [&](const PositionRange& r) {
      return position >= r.begin && position < r.end;
    });
    missing -= unbacked ? 1 : 0;
  }
  return missing;
}

void AddRecallStats(const RecallStats& recall, SequenceStats& stats) {
  stats.recall_queries = recall.queries;
  stats.recall_reads = recall.reads;
  stats.recall_reads_max = recall.reads_max;
  stats.promoted = recall.promoted;
  stats.mass_missing = recall.mass_missing;
  stats.sketch_bytes = recall.sketch_bytes;
  stats.pages_resting = recall.pages_resting;
  stats.pages_rested = recall.pages_rested;
  stats.pages_asked = recall.pages_asked;
  stats.pages_returned = recall.pages_returned;
  stats.pages_lost = recall.pages_lost;
  stats.missed_picks = recall.missed_picks;
  stats.waits_given_up = recall.waits_given_up;
}

}  // namespace

std::vector<int64_t> SequenceCache::used_after(int64_t num_tokens) const {
  std::vector<int64_t> used;
  for (const LayerStorage& block : storage_) used.push_back(block.table(0).UsedAfter(num_tokens));
  return used;
}

bool SequenceCache::Fits(int64_t num_tokens) const {
  return std::all_of(storage_.begin(), storage_.end(), [num_tokens](const LayerStorage& block) {
    return block.table(0).Fits(num_tokens);
  });
}

// What the first of a layer's blocks has beyond an even share. All blocks gain and lose
// by the same counts, so that every rank learns from its own what the mean is.
int64_t SequenceCache::ExtraSlots(int layer) const {
  if (!blocks_.divided) return 0;
  return BudgetOf(layer * blocks_.per_layer).prompt_budget_tokens -
         budget_.OfLayer(layer).prompt_budget_tokens;
}

int64_t SequenceCache::total_used() const {
  int64_t total = 0;
  for (int layer = 0; layer < rank_.shape.num_layers; ++layer) {
    total += storage_[layer * blocks_.per_layer].used() - ExtraSlots(layer);
  }
  return total;
}

int64_t SequenceCache::total_capacity() const {
  int64_t total = 0;
  for (const LayerStorage& block : storage_) total += block.capacity();
  return total;
}

bool SequenceCache::OverBudget() const {
  if (!budget_.bounded_decode) return false;
  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    if (storage_[block].resident() > BudgetOf(block).budget_tokens) return true;
  }
  return false;
}

int64_t SequenceCache::tokens_resident() const {
  const int num_layers = rank_.shape.num_layers;
  int64_t total = 0;
  for (int layer = 0; layer < num_layers; ++layer) {
    total += storage_[layer * blocks_.per_layer].resident() - ExtraSlots(layer);
  }
  return static_cast<int64_t>(std::llround(static_cast<double>(total) / num_layers));
}

int64_t SequenceCache::first_scored_query() const {
  switch (budget_.prompt_scores) {
    case PromptScores::kNone:
      return options_.prompt_tokens;
    case PromptScores::kWindow:
      return options_.prompt_tokens - budget_.window;
    case PromptScores::kAllQueries:
      return 0;
  }
  return 0;
}

int SequenceCache::ModelHead(int block, int set) const {
  if (options_.policy.scope == Scope::kLayer) return -1;
  return rank_.shape.first_kv_head + (blocks_.divided ? block % blocks_.per_layer : set);
}

void SequenceCache::AddBlockHash(int block) {
  for (int set = 0; set < blocks_.sets.own_sets; ++set) {
    const std::span<const Position> positions = table(block, set).positions();
    for (size_t slot = 0; slot < positions.size(); ++slot) {
      if (positions[slot] == kNoPosition) continue;
      AddResident(blocks_.LayerOf(block), ModelHead(block, set) + 1, static_cast<int>(slot),
                  positions[slot], hash_);
    }
  }
}

int64_t SequenceCache::LargestDropped(std::span<const PositionRange> unbacked) const {
  if (unbacked.empty()) return 0;
  int64_t largest = 0;
  for (const LayerStorage& block : storage_) {
    for (int set = 0; set < block.num_sets(); ++set) {
      largest = std::max(largest, CountMissing(block.table(set), unbacked));
    }
  }
  return largest;
}

SequenceStats SequenceCache::Stats() const {
  SequenceStats stats;
  stats.budget = budget_;
  stats.prompt_tokens = options_.prompt_tokens;
  stats.tokens_seen = tokens_seen_;
  stats.plans = plans_;
  stats.device_bytes = device_bytes();
  stats.peak_device_bytes = peak_bytes_;
  stats.peak_device_bytes_after_prompt = peak_bytes_after_prompt_;
  stats.host_bytes = host_pages_.reserved_bytes();
  if (recall_ != nullptr) AddRecallStats(recall_->stats(), stats);
  if (!prompt_done_) return stats;
  const std::vector<PositionRange> unbacked = host_pages_.Unbacked(tokens_seen_);
  for (const PositionRange& range : unbacked) stats.tokens_unbacked += range.end - range.begin;
  stats.tokens_resident = tokens_resident();
  stats.tokens_dropped = LargestDropped(unbacked);
  stats.tokens_demoted = tokens_seen_ - stats.tokens_resident - stats.tokens_dropped;
  return stats;
}

absl::StatusOr<ResidentSet> SequenceCache::ReadSet(int block, int set,
                                                   std::span<const int64_t> scores) const {
  ResidentSet resident;
  resident.layer = blocks_.LayerOf(block);
  resident.kv_head = ModelHead(block, set);
  const SlotTable& slots = table(block, set);
  for (int32_t slot : slots.SlotsByPosition()) {
    resident.positions.push_back(slots.positions()[slot]);
    resident.scores.push_back(scores[set * storage_[block].capacity() + slot]);
  }
  return resident;
}

absl::StatusOr<PlanReport> SequenceCache::Report(bool with_sets) const {
  if (!prompt_done_) {
    return absl::FailedPreconditionError("the prompt has not run to its end");
  }
  PlanReport report;
  report.sequence = id_;
  report.scope = options_.policy.scope;
  report.plan_number = plans_;
  report.tokens_seen = tokens_seen_;
  report.tokens_resident = tokens_resident();
  report.hash = hash_.positions;
  report.watermark = host_pages_.Watermark(tokens_seen_);
  report.unbacked = host_pages_.Unbacked(tokens_seen_);
  if (!with_sets) return report;

  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    HW_ASSIGN_OR_RETURN(const std::vector<int64_t> scores, ReadScores(block));
    for (int set = 0; set < blocks_.sets.own_sets; ++set) {
      HW_ASSIGN_OR_RETURN(ResidentSet resident, ReadSet(block, set, scores));
      report.sets.push_back(std::move(resident));
    }
  }
  return report;
}

absl::StatusOr<std::vector<std::byte>> SequenceCache::ReadResident(int layer, int kv_head,
                                                                   Position position) const {
  HW_CHECK(layer >= 0 && layer < rank_.shape.num_layers && !storage_.empty());
  HW_CHECK(kv_head >= 0 && kv_head < rank_.shape.num_kv_heads);
  const int block = blocks_.BlockOf(layer, kv_head);
  const std::span<const Position> positions =
      table(block, blocks_.sets.own_sets == 1 ? 0 : kv_head).positions();
  const auto found = std::find(positions.begin(), positions.end(), position);
  if (found == positions.end()) {
    return absl::NotFoundError(
        absl::StrCat("position ", position, " is not resident in layer ", layer));
  }
  const LayerView view = View(block);
  const int64_t half = rank_.shape.row_bytes() / 2;
  const int64_t first = blocks_.divided ? 0 : kv_head * view.capacity;
  const int64_t offset = (first + (found - positions.begin())) * half;
  std::vector<std::byte> row(2 * half);
  const std::span<std::byte> bytes(row);
  HW_RETURN_IF_ERROR(
      memory_.backend().CopyToHost(bytes.first(half), view.keys.Sub(offset, half), stream_));
  HW_RETURN_IF_ERROR(
      memory_.backend().CopyToHost(bytes.subspan(half), view.values.Sub(offset, half), stream_));
  HW_RETURN_IF_ERROR(memory_.backend().Synchronize(stream_));
  return row;
}

absl::StatusOr<std::vector<std::byte>> SequenceCache::ReadKv(int layer, int kv_head,
                                                             Position position) const {
  auto resident = ReadResident(layer, kv_head, position);
  if (!absl::IsNotFound(resident.status())) return resident;
  const int64_t page = position / rank_.shape.page_tokens;
  const std::byte* rows =
      host_pages_.has_copy(position) ? host_pages_.Page(layer, kv_head, page) : nullptr;
  if (rows == nullptr && recall_ != nullptr && recall_->Rests(layer, kv_head, page)) {
    return absl::UnavailableError(absl::StrCat("position ", position, " of layer ", layer,
                                               " rests: this rank cannot read it now"));
  }
  if (rows == nullptr) {
    return absl::NotFoundError(absl::StrCat("position ", position, " is not resident in layer ",
                                            layer, " and has no copy that this rank can read"));
  }
  const int64_t bytes = rank_.shape.row_bytes();
  const std::byte* row = rows + position % rank_.shape.page_tokens * bytes;
  return std::vector<std::byte>(row, row + bytes);
}

}  // namespace heavywater
