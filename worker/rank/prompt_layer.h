// One layer of a running prompt: its whole KV, its votes, and the choice of what
// the layer keeps. The same memory serves layer after layer; where the prompt comes
// in steps (SequenceOptions::prompt_in_steps), each layer has KV memory of its own.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/cache/layer_storage.h"
#include "worker/rank/attention_rows.h"
#include "worker/rank/gains_region.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {

class PromptLayer {
 public:
  // Within the sequence's reservation.
  static absl::StatusOr<std::unique_ptr<PromptLayer>> Create(RankCache& cache,
                                                             SequenceCache& sequence);

  int64_t bytes() const;

  // K and V of positions [0, count) from the host pages to their slots. DATA_LOSS.
  absl::Status LoadStored(int layer, int64_t count);
  // K and V of positions [first, first + count), to slots and host pages; then
  // attention of the same rows' queries.
  absl::Status AppendAndAttend(int layer, Position first, int64_t count, const AttentionRows& rows);

  // After the last chunk: this rank's column sums into the reduce buffer. FAILED_
  // PRECONDITION when they are this rank's alone (scope kv_head) and wrong.
  absl::Status CollectSums(int layer);
  // The ranks' agreement (kPromptFields), at the buffer's beginning.
  absl::Status WriteAgreement(std::span<const int64_t> entries);
  DeviceSpan<int64_t> reduce_buffer() const;
  // After the reduce: the agreement's entries. FAILED_PRECONDITION when reduced
  // sums are not those of every rank's queries.
  absl::StatusOr<std::vector<int64_t>> ReadAgreement() const;
  absl::Status CheckReducedSums(int layer) const;

  // Votes, selects, and moves the kept rows to the sequence's next layer, `layer`.
  absl::Status Compress(int layer);

 private:
  PromptLayer(RankCache& cache, SequenceCache& sequence);
  absl::Status Allocate();
  absl::Status Append(int layer, Position first, int64_t count, const AttentionRows& rows);
  LayerView View(int layer, int64_t used) const;
  absl::Status TurnToPlaces(PromptParams& attend);
  bool has_scores() const;
  absl::Status CheckSums(int layer) const;
  absl::StatusOr<DeviceSpan<int64_t>> Ranking();
  absl::StatusOr<DeviceSpan<int64_t>> ExposedSums(DeviceSpan<int64_t> sums);
  void Expose(std::span<int64_t> sums) const;
  absl::StatusOr<std::vector<Position>> ChooseKept(const LayerView& whole,
                                                   DeviceSpan<const int64_t> ranking,
                                                   const LayerBudget& budget);
  absl::Status CompressWhole(int layer);
  // HeadBudgets::kAdaptive.
  absl::Status CompressHeads(int layer);
  absl::StatusOr<std::vector<int64_t>> KeptOfHeads(int layer) const;
  absl::StatusOr<DeviceSpan<const int64_t>> Seeds();
  absl::StatusOr<DeviceSpan<const int64_t>> PooledSeeds();
  absl::StatusOr<std::vector<int64_t>> ToHost(DeviceSpan<const int64_t> from) const;

  RankCache& cache_;
  SequenceCache& sequence_;
  const int64_t num_tokens_;
  const int own_sets_;            // of a layer
  GainsRegion region_;            // [rows][num_tokens] behind the agreement
  std::vector<LayerStorage> kv_;  // [1 or num_layers], slot == position
  DeviceBuffer sums_;             // the agreement, the region, the sums of its rows
  DeviceBuffer votes_;            // [own_sets][num_tokens], what the choice ranks by
  DeviceBuffer mask_;             // [own_sets][num_tokens]
  DeviceBuffer scratch_;
  DeviceBuffer turned_keys_;  // of one layer, at cache-relative places
};

}  // namespace heavywater
