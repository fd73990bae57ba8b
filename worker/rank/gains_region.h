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

// For each layer [sets.rows()][used of the layer], one after the other from `begin`.
struct GainsRegion {
  SetLayout sets;
  int64_t begin = 0;
  std::vector<int64_t> used;  // [num_layers] slots per row

  int num_layers() const { return static_cast<int>(used.size()); }
  int64_t num_rows() const { return int64_t{num_layers()} * sets.rows(); }
  int64_t size() const { return Before(num_layers()); }
  int64_t end() const { return begin + size(); }

  // The rows of `count` layers from `layer` on.
  DeviceSpan<int64_t> Layers(DeviceSpan<int64_t> buffer, int layer, int count) const {
    return buffer.Sub(begin + Before(layer), Before(layer + count) - Before(layer));
  }

  // This rank's rows of a layer: [own_sets][used], as CollectGains writes and
  // AddScores reads them.
  DeviceSpan<int64_t> Own(DeviceSpan<int64_t> buffer, int layer) const {
    return buffer.Sub(begin + Before(layer) + sets.first_own * used[layer],
                      sets.own_sets * used[layer]);
  }

 private:
  int64_t Before(int layer) const {
    return std::accumulate(used.begin(), used.begin() + layer, int64_t{0}) * sets.rows();
  }
};

// The sum of every row, [num_layers][rows], to `to`.
absl::Status SumGainRows(const GainsRegion& region, DeviceSpan<int64_t> buffer,
                         DeviceSpan<int64_t> to, Backend& backend, Stream& stream);

// Every softmax sums to 1, so the gains of a row must sum to (its query heads) x
// (queries), together with what recall's picks received (`recalled`,
// [num_layers][rows]; empty: no recall). `row_sums` is the region's
// Backend::SumRows(), [num_layers][rows]. FAILED_PRECONDITION naming layer, got and
// wanted: some contribution is missing or wrong. Rows that are reduced are checked
// after the reduce, where every rank sees the same; a rank's own rows before it,
// so that it can tell the others. Of pivotal counts less is known: each of them is
// whole, and no query counts a position twice.
absl::Status CheckMass(const KvShape& shape, Scope scope, GainKind kind, const GainsRegion& region,
                       int64_t queries, int first_layer, std::span<const int64_t> row_sums,
                       std::span<const int64_t> recalled = {});

}  // namespace heavywater
