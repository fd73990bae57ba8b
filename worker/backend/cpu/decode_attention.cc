#include "worker/backend/cpu/decode_attention.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "cache_service/base/check.h"
#include "worker/backend/cpu/scratch.h"
#include "worker/backend/host_memory.h"
#include "worker/backend/pivotal.h"
#include "worker/backend/sketch.h"

namespace heavywater {
namespace {

constexpr double kNoMaximum = -std::numeric_limits<double>::infinity();

// Rows of a unit. With recall it holds whole tokens: their heads pick together.
int64_t RowsPerUnit(const KvShape& shape, const AttendItem& item) {
  const int64_t group = shape.group_size();
  if (item.recall == nullptr || group > kMaxQueryRows) return kMaxQueryRows;
  return kMaxQueryRows / group * group;
}

// Units that a token with recall may need for one KV head.
int64_t UnitsPerGroup(const KvShape& shape) {
  return (shape.group_size() + kMaxQueryRows - 1) / kMaxQueryRows;
}

int64_t NumBlocks(int64_t used) { return (used + kSlotBlock - 1) / kSlotBlock; }

void FetchLines(const void* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    __builtin_prefetch(static_cast<const std::byte*>(from) + i, /*rw=*/0, /*locality=*/2);
  }
}

// What the scan begins with.
void FetchRecall(const RecallView& recall, int num_sets, int kv_head) {
  if (recall.all || recall.num_pages == 0) return;
  const std::span<const uint16_t> set = DemotedOfKvHead(recall, num_sets, kv_head);
  FetchLines(set.data(), static_cast<int64_t>(set.size_bytes()));
  FetchLines(SketchOfKvHead(recall, kv_head, /*page=*/0), recall.sketch.page_bytes());
  FetchLines(recall.channels.device_address() + int64_t{kv_head} * recall.sketch.channels,
             recall.sketch.channels);
}

}  // namespace

// What one unit needs until its blocks are merged.
struct DecodeAttention::Scratch {
  float* queries = nullptr;        // [kMaxQueryRows][padded head_dim]
  float* weights = nullptr;        // [kMaxQueryRows][num_blocks * kSlotBlock]
  float* out = nullptr;            // [num_blocks][kMaxQueryRows][padded head_dim]
  BlockResult* results = nullptr;  // [num_blocks]
  QueryRows rows;
};

// Up to kMaxQueryRows queries of one item that read the same KV head.
struct DecodeAttention::Unit {
  const AttendItem* item = nullptr;
  int kv_head = 0;
  int64_t first_row = 0;  // counted over the item's tokens x the head's group
  int num_rows = 0;
  int64_t num_blocks = 0;
  // Units that finish together, from their leader on: a token whose group needs
  // several, with recall. Else each is alone.
  Unit* leader = nullptr;
  int num_units = 1;               // the leader's
  int64_t blocks_left = 0;         // the leader's; atomic
  std::optional<Scratch> scratch;  // from the first block's start to the merge
  bool started = false;            // there is scratch, and its queries; atomic

  // The row's token within the item.
  int64_t TokenOf(const KvShape& shape, int row) const {
    return (first_row + row) / shape.group_size();
  }
  // Where the row lies in the batch's queries and outputs.
  int64_t OffsetOf(const KvShape& shape, int row) const {
    const int64_t head =
        int64_t{kv_head} * shape.group_size() + (first_row + row) % shape.group_size();
    return ((item->first_token + TokenOf(shape, row)) * shape.num_query_heads + head) *
           shape.head_dim;
  }
};

// One block of a unit.
struct DecodeAttention::Task {
  Unit* unit = nullptr;
  int64_t block = 0;
};

const std::byte* DecodeAttention::FirstKey(const KvShape& shape, const Task& task) {
  return RowsOfKvHead(shape, task.unit->item->layer, task.unit->kv_head)
      .Key(task.block * kSlotBlock);
}

DecodeAttention::DecodeAttention(CpuTarget target, ThreadPool& pool)
    : kernels_(DecodeKernelsOf(target)),
      pool_(pool),
      recalls_(pool.num_threads(), RecallAttention(target)),
      factors_(pool.num_threads()) {}
DecodeAttention::~DecodeAttention() = default;

// As tasks are claimed in order, no more than num_threads + 1 units, or tokens of
// several units each, hold scratch at a time. Returns the bytes of `parts` and, one per
// thread if there is recall, `recalls`.
int64_t DecodeAttention::CutScratch(const KvShape& shape, int64_t num_blocks,
                                    const RecallLimits& recall, std::byte* memory,
                                    std::vector<Scratch>& parts,
                                    std::vector<RecallScratch>& recalls) const {
  const int64_t padded = PaddedRow(shape.head_dim);
  ScratchCutter cutter(memory);
  parts.resize((pool_.num_threads() + 1) * UnitsPerGroup(shape));
  recalls.clear();
  for (Scratch& part : parts) {
    part.queries = cutter.Take<float>(kMaxQueryRows * padded);
    part.weights = cutter.Take<float>(kMaxQueryRows * num_blocks * kSlotBlock);
    part.out = cutter.Take<float>(num_blocks * kMaxQueryRows * padded);
    part.results = cutter.Take<BlockResult>(num_blocks);
  }
  if (recall.any()) {
    for (int thread = 0; thread < pool_.num_threads(); ++thread) {
      recalls.push_back(CutRecallScratch(shape, num_blocks, recall, cutter));
    }
  }
  return cutter.bytes();
}

int64_t DecodeAttention::ScratchBytes(const KvShape& shape, int64_t capacity,
                                      const RecallLimits& recall) const {
  const int64_t num_blocks = std::max<int64_t>(NumBlocks(capacity), 1);
  std::vector<Scratch> parts;
  std::vector<RecallScratch> recalls;
  return CutScratch(shape, num_blocks, recall, /*memory=*/nullptr, parts, recalls);
}

void DecodeAttention::MakeUnits(const KvShape& shape, const AttendParams& params,
                                std::vector<Unit>& units) {
  units.clear();
  for (const AttendItem& item : params.items) {
    const int64_t num_rows = item.num_tokens * shape.group_size();
    // An item without slots still has outputs to write: one empty block.
    const int64_t num_blocks = std::max<int64_t>(NumBlocks(item.layer.used), 1);
    const int64_t rows_per_unit = RowsPerUnit(shape, item);
    // A token in several units: all of its rows, and no other's, are theirs.
    const bool split = item.recall != nullptr && shape.group_size() > kMaxQueryRows;
    const int64_t rows_together = split ? shape.group_size() : rows_per_unit;
    for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      for (int64_t row = 0; row < num_rows; row += rows_together) {
        const int64_t end = std::min(row + rows_together, num_rows);
        for (int64_t first = row; first < end; first += rows_per_unit) {
          Unit& unit = units.emplace_back();
          unit.item = &item;
          unit.kv_head = kv_head;
          unit.first_row = first;
          unit.num_rows = static_cast<int>(std::min(end - first, rows_per_unit));
          unit.num_units = static_cast<int>((end - row + rows_per_unit - 1) / rows_per_unit);
          unit.num_blocks = num_blocks;
        }
      }
    }
  }
  for (size_t first = 0; first < units.size(); first += units[first].num_units) {
    Unit& leader = units[first];
    leader.blocks_left = leader.num_blocks * leader.num_units;
    for (int i = 0; i < leader.num_units; ++i) units[first + i].leader = &leader;
  }
}

void DecodeAttention::Attend(const KvShape& shape, const AttendParams& params) {
  if (params.items.empty()) return;
  MakeUnits(shape, params, units_);
  PrepareScratch(shape, params);
  tasks_.clear();
  for (Unit& unit : units_) {
    for (int64_t block = 0; block < unit.num_blocks; ++block) tasks_.push_back({&unit, block});
  }
  pool_.Run(static_cast<int64_t>(tasks_.size()), [&](int64_t index, int thread) {
    auto [unit, block] = tasks_[index];
    // What this thread probably does next, if all take equally long.
    const auto next = static_cast<size_t>(index + pool_.num_threads());
    StartBlock(shape, params, *unit);
    FetchWhatFollows(shape, params, *unit, next < tasks_.size() ? tasks_[next].unit : nullptr);
    AttendBlock(shape, params, tasks_[index], next < tasks_.size() ? &tasks_[next] : nullptr);
    if (!FinishBlock(*unit)) return;
    if (unit->item->recall == nullptr) {
      FinishUnit(shape, params, *unit, factors_[thread]);
    } else {
      Recall(shape, params, *unit->leader, recalls_[thread], factors_[thread]);
    }
  });
}

// During a unit's last block: what its end and the next unit's beginning would wait for.
void DecodeAttention::FetchWhatFollows(const KvShape& shape, const AttendParams& params, Unit& unit,
                                       const Unit* next) {
  std::atomic_ref<int64_t> blocks_left(unit.leader->blocks_left);
  if (blocks_left.load(std::memory_order_relaxed) > 1) return;
  if (unit.item->recall != nullptr) {
    FetchRecall(*unit.item->recall, unit.item->layer.num_sets, unit.kv_head);
  }
  if (next == nullptr || next == &unit) return;
  FetchLines(params.queries.device_address() + next->OffsetOf(shape, 0),
             next->num_rows * shape.head_dim * int64_t{sizeof(float)});
}

// Every part is large enough for any of the units.
void DecodeAttention::PrepareScratch(const KvShape& shape, const AttendParams& params) {
  int64_t num_blocks = 1;
  RecallLimits recall;
  for (const AttendItem& item : params.items) {
    num_blocks = std::max(num_blocks, NumBlocks(item.layer.used));
    if (item.recall != nullptr) recall.Raise(LimitsOf(*item.recall));
  }
  MutexLock lock(&mutex_);
  const int64_t bytes = CutScratch(shape, num_blocks, recall, params.scratch.device_address(),
                                   free_, recall_scratch_);
  HW_CHECK(bytes <= params.scratch.size());
  for (size_t thread = 0; thread < recall_scratch_.size(); ++thread) {
    recalls_[thread].SetScratch(recall_scratch_[thread]);
  }
}

// The first block of a unit takes scratch and prepares the queries.
void DecodeAttention::StartBlock(const KvShape& shape, const AttendParams& params, Unit& unit) {
  std::atomic_ref<bool> started(unit.started);
  if (started.load(std::memory_order_acquire)) return;
  MutexLock lock(&mutex_);
  if (unit.scratch.has_value()) return;
  HW_CHECK(!free_.empty());
  unit.scratch = free_.back();
  free_.pop_back();
  Scratch& scratch = *unit.scratch;
  const int64_t padded = PaddedRow(shape.head_dim);
  std::uninitialized_value_construct_n(scratch.results, unit.num_blocks);
  float* queries = scratch.queries;
  for (int row = 0; row < unit.num_rows; ++row) {
    const float* query = params.queries.device_address() + unit.OffsetOf(shape, row);
    float* scaled = queries + row * padded;
    for (int i = 0; i < shape.head_dim; ++i) scaled[i] = query[i] * params.scale;
    std::fill(scaled + shape.head_dim, scaled + padded, 0.0f);
    scratch.rows.positions[row] =
        static_cast<Position>(unit.item->first_position + unit.TokenOf(shape, row));
  }
  scratch.rows.queries = queries;
  scratch.rows.num_rows = unit.num_rows;
  started.store(true, std::memory_order_release);
}

// Whoever finishes the last one sees what the others have written.
bool DecodeAttention::FinishBlock(Unit& unit) {
  std::atomic_ref<int64_t> blocks_left(unit.leader->blocks_left);
  return blocks_left.fetch_sub(1, std::memory_order_acq_rel) == 1;
}

void DecodeAttention::Release(Unit& unit) {
  MutexLock lock(&mutex_);
  free_.push_back(*std::exchange(unit.scratch, std::nullopt));
}

void DecodeAttention::AttendBlock(const KvShape& shape, const AttendParams& params,
                                  const Task& task, const Task* next) {
  auto [unit_of_task, block] = task;
  Unit& unit = *unit_of_task;
  const LayerView& layer = unit.item->layer;
  Scratch& scratch = *unit.scratch;
  const int64_t first = block * kSlotBlock;
  BlockResult& result = scratch.results[block];
  result.weights = scratch.weights + first;
  result.weights_stride = unit.num_blocks * kSlotBlock;
  result.out = scratch.out + block * kMaxQueryRows * PaddedRow(shape.head_dim);
  if (layer.used == 0) {
    std::fill_n(result.maximum, kMaxQueryRows, static_cast<float>(kNoMaximum));
    return;
  }
  const KvHeadRows rows = RowsOfKvHead(shape, layer, unit.kv_head);
  const SlotBlock slots{
      .dtype = shape.dtype,
      .head_dim = shape.head_dim,
      .keys = rows.Key(first),
      .values = rows.Value(first),
      .positions = layer.positions.device_address() +
                   SetOfKvHead(layer, unit.kv_head) * layer.capacity + first,
      .count = static_cast<int>(std::min<int64_t>(layer.used - first, kSlotBlock)),
      .next_keys = next == nullptr ? nullptr : FirstKey(shape, *next)};
  kernels_.attend_block(slots, scratch.rows, result);
}

// What turns the row's weights into probabilities: factors[block * kMaxQueryRows], all 0
// when it sees no slot. Brings the blocks to a common maximum.
void DecodeAttention::BlockFactors(std::span<const BlockResult> blocks, int row, double* factors) {
  double maximum = kNoMaximum;
  for (const BlockResult& block : blocks) maximum = std::max<double>(maximum, block.maximum[row]);
  if (maximum == kNoMaximum) return;
  double sum = 0;
  for (size_t block = 0; block < blocks.size(); ++block) {
    double& factor = factors[block * kMaxQueryRows];
    factor = std::exp(blocks[block].maximum[row] - maximum);
    sum += factor * blocks[block].sum[row];
  }
  for (size_t block = 0; block < blocks.size(); ++block) factors[block * kMaxQueryRows] /= sum;
}

// The order is fixed, whoever computed which block. `factors` becomes the blocks',
// [block][kMaxQueryRows].
void DecodeAttention::Merge(const KvShape& shape, const AttendParams& params, Unit& unit,
                            std::span<const BlockResult> blocks, std::vector<double>& factors) {
  factors.assign(blocks.size() * kMaxQueryRows, 0.0);
  double sums[kMaxKvHeadDim];
  for (int row = 0; row < unit.num_rows; ++row) {
    BlockFactors(blocks, row, factors.data() + row);
    std::fill_n(sums, shape.head_dim, 0.0);
    for (size_t block = 0; block < blocks.size(); ++block) {
      const double factor = factors[block * kMaxQueryRows + row];
      if (factor == 0) continue;  // nothing was computed where nothing is seen
      kernels_.add_scaled(blocks[block].out + row * PaddedRow(shape.head_dim), factor,
                          shape.head_dim, sums);
    }
    float* out = params.out.device_address() + unit.OffsetOf(shape, row);
    for (int i = 0; i < shape.head_dim; ++i) out[i] = static_cast<float>(sums[i]);
  }
}

void DecodeAttention::FinishUnit(const KvShape& shape, const AttendParams& params, Unit& unit,
                                 std::vector<double>& factors) {
  Merge(shape, params, unit, {unit.scratch->results, static_cast<size_t>(unit.num_blocks)},
        factors);
  if (unit.item->accumulate_gains) AddGains(unit, factors);
  Release(unit);
}

// After the slots' blocks: the picks', then all are merged.
void DecodeAttention::Recall(const KvShape& shape, const AttendParams& params, Unit& leader,
                             RecallAttention& recall, std::vector<double>& factors) {
  const std::span<Unit> units(&leader, leader.num_units);
  std::vector<RecallPart> parts;
  int64_t num_rows = 0;
  for (Unit& unit : units) {
    parts.push_back({.rows = &unit.scratch->rows,
                     .slots = {unit.scratch->results, static_cast<size_t>(unit.num_blocks)}});
    num_rows += unit.num_rows;
  }
  const RecallWork work{.shape = shape,
                        .item = *leader.item,
                        .kv_head = leader.kv_head,
                        .first_token = leader.TokenOf(shape, 0),
                        .num_tokens = num_rows / shape.group_size(),
                        .parts = parts};
  recall.AttendPicks(work);
  recall.ReportMissing(work);
  for (int part = 0; part < leader.num_units; ++part) {
    Unit& unit = units[part];
    Merge(shape, params, unit, recall.Blocks(part), factors);
    if (unit.item->accumulate_gains) AddGains(unit, factors);
    MutexLock lock(&gains_mutex_);
    recall.AddGains(work, part, factors);
  }
  for (Unit& unit : units) Release(unit);
}

void DecodeAttention::AddGains(const Unit& unit, const std::vector<double>& factors) {
  const LayerView& layer = unit.item->layer;
  int64_t* gains = layer.gains.device_address() + unit.kv_head * layer.capacity;
  double thresholds[kMaxQueryRows] = {};
  for (int row = 0; row < unit.num_rows; ++row) {
    thresholds[row] = PivotalThreshold(unit.scratch->rows.positions[row]);
  }
  // Units of more queries than fit one share the KV head's gains.
  MutexLock lock(&gains_mutex_);
  for (int64_t first = 0; first < layer.used; first += kSlotBlock) {
    const int64_t block = first / kSlotBlock;
    const BlockResult& result = unit.scratch->results[block];
    const double* of_block = factors.data() + block * kMaxQueryRows;
    const int64_t count = std::min<int64_t>(layer.used - first, kSlotBlock);
    if (unit.item->gains == GainKind::kPivotal) {
      CountPivotal(result.weights, result.weights_stride, of_block, thresholds, unit.num_rows,
                   count, gains + first);
    } else {
      kernels_.add_gains(result.weights, result.weights_stride, of_block, unit.num_rows, count,
                         gains + first);
    }
  }
}

}  // namespace heavywater
