// Debugging: remembers every K and V row as the model computed it, apart from
// slots and host pages, so that a test can compare what those hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/rank/forwarding_model.h"
#include "worker/rank/plan_report.h"

namespace heavywater {

// A model that passes everything on to another and records the rows of
// ComputeQkv. Used by the thread of the step, which says before each step whose
// rows come.
//
// Files of a sequence (in host byte order):
//   seq<ID>_rank<R>.kv    rows as appended: [layer][kv_head of this rank]
//                         [position 0 .. tokens_seen), each row K then V,
//                         head_dim elements of the KV dtype each
//   seq<ID>_rank<R>.json  {"sequence_id","rank","plan","tokens_seen","dtype",
//                         "num_layers","first_kv_head","num_kv_heads",
//                         "head_dim","row_bytes","sets":[{"layer","kv_head",
//                         "positions":[],"scores":[]}]}: the slot tables;
//                         kv_head -1: one set for all heads; scores in 2^-32
class KvRecorder final : public ForwardingModel {
 public:
  // Rows of one sequence in the next calls.
  struct Rows {
    SequenceId sequence = 0;
    Position first_position = 0;
    int64_t count = 0;
  };

  KvRecorder(Model& model, Backend& backend, const KvShape& shape)
      : ForwardingModel(model), backend_(backend), shape_(shape) {}

  void Expect(std::vector<Rows> rows) { expected_ = std::move(rows); }
  // Both files, into `directory`; `plan` as reported, `report` with sets.
  absl::Status Dump(const std::string& directory, int rank, int64_t plan,
                    const PlanReport& report) const;
  void Forget(SequenceId sequence) { recorded_.erase(sequence); }

  absl::Status ComputeQkv(int layer, DeviceSpan<const float> hidden,
                          std::span<const Position> positions, DeviceSpan<float> q,
                          DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) override;

 private:
  // [position][kv_head] rows of one layer.
  using LayerRows = std::vector<std::byte>;

  void Record(int layer, const Rows& rows, std::span<const float> k, std::span<const float> v);
  void Store(std::span<const float> vector, std::byte* to) const;

  Backend& backend_;
  const KvShape shape_;
  std::vector<Rows> expected_;
  std::map<SequenceId, std::vector<LayerRows>> recorded_;
};

}  // namespace heavywater
