// Recall within a decode step of the CPU backend: after a unit's slots, its tokens
// pick, and attend to the picks as further blocks of the unit.
#pragma once

#include <span>
#include <vector>

#include "worker/backend/backend.h"
#include "worker/backend/cpu/decode_kernels.h"
#include "worker/backend/cpu/picker.h"
#include "worker/backend/cpu/scan_kernels.h"
#include "worker/backend/cpu/scratch.h"

namespace heavywater {

// Picks of a block: their K and V are gathered and stay in L1 or close to it.
inline constexpr int kPickBlock = 64;

// Up to kMaxQueryRows queries and what they got from their slots.
struct RecallPart {
  const QueryRows* rows = nullptr;
  std::span<const BlockResult> slots;
};

// Whole tokens of one item and KV head: all of the group's query heads of each. A
// group of more than kMaxQueryRows is one token in several parts, else one part
// holds all tokens.
struct RecallWork {
  const KvShape& shape;
  const AttendItem& item;
  int kv_head = 0;
  int64_t first_token = 0;  // within the item
  int64_t num_tokens = 0;
  std::span<const RecallPart> parts;
};

// What grows with picks: of the largest unit, one thread.
struct RecallScratch {
  std::byte* gathered = nullptr;  // [kPickBlock] keys, then values
  float* weights = nullptr;       // [parts][blocks][kMaxQueryRows][kPickBlock]
  float* out = nullptr;           // [parts][blocks][kMaxQueryRows][PaddedRow(head_dim)]
  BlockResult* blocks = nullptr;  // [parts][slots' blocks, then picks']
  int64_t max_pick_blocks = 0;
};
RecallScratch CutRecallScratch(const KvShape& shape, int64_t num_slot_blocks,
                               const RecallLimits& limits, ScratchCutter& cutter);

// Holds what a unit needs until its blocks are merged, reused between calls. One
// thread at a time.
class RecallAttention {
 public:
  explicit RecallAttention(CpuTarget target)
      : decode_kernels_(&DecodeKernelsOf(target)), scan_kernels_(&ScanKernelsOf(target)) {}

  // Before every step.
  void SetScratch(const RecallScratch& scratch) { scratch_ = scratch; }

  // Picks, and attends to the picks.
  void AttendPicks(const RecallWork& work);

  // After AttendPicks(): a part's blocks, of its slots and then of its picks. Rows of
  // other tokens have maximum -infinity in these.
  std::span<const BlockResult> Blocks(int part) const {
    return {scratch_.blocks + part * num_blocks_, static_cast<size_t>(num_blocks_)};
  }

  // After AttendPicks(), when a part's blocks are merged: adds the probabilities of
  // its picks to recall->gains. `factors` is [blocks][kMaxQueryRows]. The caller
  // sees to it that nobody else adds to the KV head's gains meanwhile.
  void AddGains(const RecallWork& work, int part, std::span<const double> factors);

  // After AttendPicks(): recall->missing.
  void ReportMissing(const RecallWork& work);

 private:
  // A token's picks; in mode `all` they are every token's.
  struct PickList {
    int64_t first = 0;  // within picks_
    int64_t count = 0;
    int64_t first_row = 0;  // rows that attend to them, counted over the parts
    int64_t num_rows = 0;
  };

  std::span<const Position> PicksOf(const PickList& list) const {
    return {picks_.data() + list.first, static_cast<size_t>(list.count)};
  }
  int64_t NumPickBlocks() const;
  PickerQuery QueryOf(const RecallWork& work, int64_t token, bool with_picks);
  void PickAll(const RecallWork& work);
  void Report(const RecallWork& work, int64_t token, std::span<const Position> picks,
              int64_t missed) const;
  void Gather(const RecallWork& work, std::span<const Position> picks);
  void AttendBlock(const RecallWork& work, const PickList& list, int64_t count, int64_t block);

  const DecodeKernels* decode_kernels_;
  const ScanKernels* scan_kernels_;
  Picker picker_;
  std::vector<Position> picks_;
  std::vector<PickList> lists_;
  int64_t num_blocks_ = 0;  // of each part: of slots and of picks
  RecallScratch scratch_;
  std::vector<const float*> queries_;  // of one token
  std::vector<double> lse_;
};

}  // namespace heavywater
