#include "worker/backend/cpu/recall_attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "cache_service/base/check.h"

namespace heavywater {
namespace {

constexpr float kNoMaximum = -std::numeric_limits<float>::infinity();
// Picks lie before every query: as if at position 0, every row sees them.
constexpr Position kSeenByAll[kPickBlock] = {};

constexpr size_t kPicksAhead = 4;

// K and V of a pick, and what it may gain.
void FetchPick(const RecallWork& work, Position pick, const std::byte* row) {
  for (int64_t i = 0; i < work.shape.row_bytes(); i += 64) __builtin_prefetch(row + i);
  const RecallView& recall = *work.item.recall;
  if (recall.gains.empty()) return;
  __builtin_prefetch(recall.gains.data() + work.kv_head * recall.gains_stride + pick, /*rw=*/1);
}

int64_t NumBlocksOf(int64_t picks) { return (picks + kPickBlock - 1) / kPickBlock; }

// Of one row's logits over the blocks.
double LogSumExp(std::span<const BlockResult> blocks, int row) {
  double maximum = kNoMaximum;
  for (const BlockResult& block : blocks) maximum = std::max<double>(maximum, block.maximum[row]);
  if (maximum == kNoMaximum) return maximum;
  double sum = 0;
  for (const BlockResult& block : blocks) {
    if (block.maximum[row] == kNoMaximum) continue;
    sum += std::exp(block.maximum[row] - maximum) * block.sum[row];
  }
  return maximum + std::log(sum);
}

// Queries that share a unit pick each for itself, but in mode `all` together.
int64_t MaxPickBlocks(const KvShape& shape, const RecallLimits& limits) {
  const int64_t tokens = std::max<int64_t>(kMaxQueryRows / shape.group_size(), 1);
  const int64_t pages = (limits.all_positions + shape.page_tokens - 1) / shape.page_tokens;
  return std::max(tokens * NumBlocksOf(limits.max_picks), NumBlocksOf(pages * shape.page_tokens));
}

}  // namespace

RecallScratch CutRecallScratch(const KvShape& shape, int64_t num_slot_blocks,
                               const RecallLimits& limits, ScratchCutter& cutter) {
  const int64_t parts = (shape.group_size() + kMaxQueryRows - 1) / kMaxQueryRows;
  RecallScratch scratch;
  scratch.max_pick_blocks = MaxPickBlocks(shape, limits);
  const int64_t rows = parts * scratch.max_pick_blocks * kMaxQueryRows;
  scratch.gathered = cutter.Take<std::byte>(int64_t{kPickBlock} * shape.row_bytes());
  scratch.weights = cutter.Take<float>(rows * kPickBlock);
  scratch.out = cutter.Take<float>(rows * PaddedRow(shape.head_dim));
  scratch.blocks = cutter.Take<BlockResult>(parts * (num_slot_blocks + scratch.max_pick_blocks));
  return scratch;
}

int64_t RecallAttention::NumPickBlocks() const {
  int64_t blocks = 0;
  for (const PickList& list : lists_) blocks += NumBlocksOf(list.count);
  return blocks;
}

// The token's query heads, relative to their slots or to these and the picks.
PickerQuery RecallAttention::QueryOf(const RecallWork& work, int64_t token, bool with_picks) {
  const int64_t group = work.shape.group_size();
  queries_.clear();
  lse_.clear();
  for (int64_t row = token * group; row < (token + 1) * group; ++row) {
    const int part = static_cast<int>(row / kMaxQueryRows);
    const int local = static_cast<int>(row % kMaxQueryRows);
    queries_.push_back(work.parts[part].rows->queries + local * PaddedRow(work.shape.head_dim));
    lse_.push_back(LogSumExp(with_picks ? Blocks(part) : work.parts[part].slots, local));
  }
  return {.recall = work.item.recall,
          .num_sets = work.item.layer.num_sets,
          .kv_head = work.kv_head,
          .queries = queries_,
          .lse = lse_};
}

void RecallAttention::Report(const RecallWork& work, int64_t token, std::span<const Position> picks,
                             int64_t missed) const {
  const RecallView& recall = *work.item.recall;
  const int64_t index = (work.first_token + token) * work.shape.num_kv_heads + work.kv_head;
  if (!recall.num_missed.empty()) recall.num_missed[index] = static_cast<int32_t>(missed);
  const auto count = static_cast<int64_t>(picks.size());
  if (!recall.num_picks.empty()) recall.num_picks[index] = static_cast<int32_t>(count);
  if (recall.picks.empty()) return;
  std::copy_n(picks.begin(), std::min(count, recall.max_picks),
              recall.picks.begin() + index * recall.max_picks);
}

void RecallAttention::PickAll(const RecallWork& work) {
  const int64_t group = work.shape.group_size();
  picks_.clear();
  lists_.clear();
  for (int64_t token = 0; token < work.num_tokens; ++token) {
    int64_t missed = 0;
    if (token == 0 || !work.item.recall->all) {
      const auto first = static_cast<int64_t>(picks_.size());
      missed = picker_.Pick(*scan_kernels_, QueryOf(work, token, /*with_picks=*/false), picks_);
      lists_.push_back({.first = first,
                        .count = static_cast<int64_t>(picks_.size()) - first,
                        .first_row = token * group,
                        .num_rows = group});
    } else {
      lists_.back().num_rows += group;
    }
    Report(work, token, PicksOf(lists_.back()), missed);
  }
}

// Rows lie apart: those of the next few picks are on their way while one is copied.
void RecallAttention::Gather(const RecallWork& work, std::span<const Position> picks) {
  const int64_t row_bytes = work.shape.row_bytes() / 2;
  std::byte* keys = scratch_.gathered;
  std::byte* values = keys + kPickBlock * row_bytes;
  const auto row_of = [&](Position pick) {
    const std::byte* page =
        work.item.recall->host.Page(work.kv_head, pick / work.shape.page_tokens);
    return page + pick % work.shape.page_tokens * 2 * row_bytes;
  };
  const auto fetch = [&](size_t i) {
    if (i < picks.size()) FetchPick(work, picks[i], row_of(picks[i]));
  };
  for (size_t i = 0; i < kPicksAhead; ++i) fetch(i);
  for (size_t i = 0; i < picks.size(); ++i) {
    fetch(i + kPicksAhead);
    const std::byte* row = row_of(picks[i]);
    std::memcpy(keys + i * row_bytes, row, row_bytes);
    std::memcpy(values + i * row_bytes, row + row_bytes, row_bytes);
  }
}

// Block number `block` of each part over the `count` picks that lie gathered.
void RecallAttention::AttendBlock(const RecallWork& work, const PickList& list, int64_t count,
                                  int64_t block) {
  const int64_t padded = PaddedRow(work.shape.head_dim);
  const int64_t num_blocks = NumPickBlocks();
  const SlotBlock slots{.dtype = work.shape.dtype,
                        .head_dim = work.shape.head_dim,
                        .keys = scratch_.gathered,
                        .values = scratch_.gathered + kPickBlock * work.shape.row_bytes() / 2,
                        .positions = kSeenByAll,
                        .count = static_cast<int>(count)};
  for (int64_t part = 0; part < static_cast<int64_t>(work.parts.size()); ++part) {
    const QueryRows& all = *work.parts[part].rows;
    BlockResult& result = scratch_.blocks[(part + 1) * num_blocks_ - num_blocks + block];
    const int64_t index = (part * num_blocks + block) * kMaxQueryRows;
    result.weights = scratch_.weights + index * kPickBlock;
    result.weights_stride = kPickBlock;
    result.out = scratch_.out + index * padded;
    std::fill_n(result.maximum, kMaxQueryRows, kNoMaximum);
    const int64_t first = std::max<int64_t>(list.first_row - part * kMaxQueryRows, 0);
    const int64_t end =
        std::min<int64_t>(list.first_row + list.num_rows - part * kMaxQueryRows, all.num_rows);
    QueryRows rows;
    rows.queries = all.queries + first * padded;
    rows.num_rows = static_cast<int>(end - first);
    std::copy_n(all.positions + first, rows.num_rows, rows.positions);
    BlockResult of_rows;
    of_rows.weights = result.weights + first * kPickBlock;
    of_rows.weights_stride = kPickBlock;
    of_rows.out = result.out + first * padded;
    decode_kernels_->attend_block(slots, rows, of_rows);
    std::copy_n(of_rows.maximum, rows.num_rows, result.maximum + first);
    std::copy_n(of_rows.sum, rows.num_rows, result.sum + first);
  }
}

void RecallAttention::AttendPicks(const RecallWork& work) {
  HW_CHECK(work.item.recall->sketch.page_tokens == work.shape.page_tokens);
  PickAll(work);
  const int64_t num_blocks = NumPickBlocks();
  HW_CHECK(num_blocks <= scratch_.max_pick_blocks);
  num_blocks_ = static_cast<int64_t>(work.parts[0].slots.size()) + num_blocks;
  BlockResult* blocks = scratch_.blocks;
  for (const RecallPart& part : work.parts) {
    std::uninitialized_copy(part.slots.begin(), part.slots.end(), blocks);
    std::uninitialized_value_construct_n(blocks + part.slots.size(), num_blocks);
    blocks += num_blocks_;
  }
  int64_t block = 0;
  for (const PickList& list : lists_) {
    const std::span<const Position> picks = PicksOf(list);
    for (int64_t first = 0; first < list.count; first += kPickBlock) {
      const int64_t count = std::min<int64_t>(list.count - first, kPickBlock);
      Gather(work, picks.subspan(first, count));
      AttendBlock(work, list, count, block++);
    }
  }
}

void RecallAttention::AddGains(const RecallWork& work, int part, std::span<const double> factors) {
  const RecallView& recall = *work.item.recall;
  if (recall.gains.empty()) return;
  int64_t* gains = recall.gains.data() + work.kv_head * recall.gains_stride;
  const std::span<const BlockResult> blocks = Blocks(part);
  auto block = static_cast<int64_t>(work.parts[part].slots.size());
  for (const PickList& list : lists_) {
    const std::span<const Position> picks = PicksOf(list);
    const int64_t first_row = std::max<int64_t>(list.first_row - part * kMaxQueryRows, 0);
    const int64_t end_row = std::min<int64_t>(list.first_row + list.num_rows - part * kMaxQueryRows,
                                              work.parts[part].rows->num_rows);
    for (int64_t first = 0; first < list.count; first += kPickBlock, ++block) {
      const int64_t count = std::min<int64_t>(list.count - first, kPickBlock);
      int64_t of_picks[kPickBlock] = {};
      decode_kernels_->add_gains(blocks[block].weights + first_row * kPickBlock, kPickBlock,
                                 factors.data() + block * kMaxQueryRows + first_row,
                                 static_cast<int>(end_row - first_row), count, of_picks);
      for (int64_t i = 0; i < count; ++i) gains[picks[first + i]] += of_picks[i];
    }
  }
}

void RecallAttention::ReportMissing(const RecallWork& work) {
  const RecallView& recall = *work.item.recall;
  if (recall.missing.empty()) return;
  for (int64_t token = 0; token < work.num_tokens; ++token) {
    const int64_t index = (work.first_token + token) * work.shape.num_kv_heads + work.kv_head;
    const PickList& list = recall.all ? lists_.front() : lists_[token];
    recall.missing[index] = picker_.MissingShare(
        *scan_kernels_, QueryOf(work, token, /*with_picks=*/true), PicksOf(list));
  }
}

}  // namespace heavywater
