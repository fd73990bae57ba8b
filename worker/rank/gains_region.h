// Where the scores of one sequence lie in the buffer that ranks reduce.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/cache/kv_layout.h"
#include "worker/policy/policy.h"
#include "worker/rank/sequence_memory.h"

namespace heavywater {

// For each block (BlockLayout) [sets.rows()][used of the block], one after the other from
// `begin`.
struct GainsRegion {
  SetLayout sets;  // of a block
  int64_t begin = 0;
  std::vector<int64_t> used;  // [num_blocks] slots per row
  int blocks_per_layer = 1;

  int num_blocks() const { return static_cast<int>(used.size()); }
  int64_t num_rows() const { return int64_t{num_blocks()} * sets.rows(); }
  int64_t size() const { return Before(num_blocks()); }
  int64_t end() const { return begin + size(); }

  // The rows of `count` blocks from `block` on.
  DeviceSpan<int64_t> Blocks(DeviceSpan<int64_t> buffer, int block, int count) const {
    return buffer.Sub(begin + Before(block), Before(block + count) - Before(block));
  }

  // This rank's rows of a block: [own_sets][used], as CollectGains writes and
  // AddScores reads them.
  DeviceSpan<int64_t> Own(DeviceSpan<int64_t> buffer, int block) const {
    return buffer.Sub(begin + Before(block) + sets.first_own * used[block],
                      sets.own_sets * used[block]);
  }

 private:
  int64_t Before(int block) const {
    return std::accumulate(used.begin(), used.begin() + block, int64_t{0}) * sets.rows();
  }
};

// The sum of every row, [num_blocks][rows], to `to`.
absl::Status SumGainRows(const GainsRegion& region, DeviceSpan<int64_t> buffer,
                         DeviceSpan<int64_t> to, Backend& backend, Stream& stream);

// Every softmax sums to 1, so the gains of a row must sum to (its query heads) x
// (queries), together with what recall's picks received (`recalled`,
// [num_blocks][rows]; empty: no recall). `row_sums` is the region's
// Backend::SumRows(), [num_blocks][rows]. FAILED_PRECONDITION naming layer, got and
// wanted: some contribution is missing or wrong. Rows that are reduced are checked
// after the reduce, where every rank sees the same; a rank's own rows before it,
// so that it can tell the others. Of pivotal counts less is known: each of them is
// whole, and no query counts a position twice.
absl::Status CheckMass(const KvShape& shape, Scope scope, GainKind kind, const GainsRegion& region,
                       int64_t queries, int first_layer, std::span<const int64_t> row_sums,
                       std::span<const int64_t> recalled = {});

}  // namespace heavywater
