// Where the scores of one sequence lie in the buffer that ranks reduce.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "worker/backend/device_buffer.h"
#include "worker/cache/kv_layout.h"
#include "worker/policy/policy.h"
#include "worker/rank/sequence_memory.h"

namespace heavywater {

// [num_layers][sets.rows()][used] from `begin`.
struct GainsRegion {
  SetLayout sets;
  int64_t begin = 0;
  int num_layers = 0;
  int64_t used = 0;  // slots per row

  int64_t num_rows() const { return int64_t{num_layers} * sets.rows(); }
  int64_t size() const { return num_rows() * used; }
  int64_t end() const { return begin + size(); }

  // All rows.
  DeviceSpan<int64_t> All(DeviceSpan<int64_t> buffer) const { return buffer.Sub(begin, size()); }

  // This rank's rows of a layer: [own_sets][used], as CollectGains writes and
  // AddScores reads them.
  DeviceSpan<int64_t> Own(DeviceSpan<int64_t> buffer, int layer) const {
    return buffer.Sub(begin + (int64_t{layer} * sets.rows() + sets.first_own) * used,
                      sets.own_sets * used);
  }
};

// Every softmax sums to 1, so the gains of a row must sum to (its query heads) x
// (queries), together with what recall's picks received (`recalled`,
// [num_layers][rows]; empty: no recall). `row_sums` is the region's
// Backend::SumRows(), [num_layers][rows]. FAILED_PRECONDITION naming layer, got and
// wanted: some contribution is missing or wrong. Rows that are reduced are checked
// after the reduce, where every rank sees the same; a rank's own rows before it,
// so that it can tell the others.
absl::Status CheckMass(const KvShape& shape, Scope scope, const GainsRegion& region,
                       int64_t queries, int first_layer, std::span<const int64_t> row_sums,
                       std::span<const int64_t> recalled = {});

}  // namespace heavywater
