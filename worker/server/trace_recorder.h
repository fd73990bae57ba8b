// `record_dir`: Q, K and V of sequences as the model computed them, as traces that
// `heavywater replay` takes (worker/replay/trace_file.h).
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/rank/forwarding_model.h"
#include "worker/rank/sequence_options.h"
#include "worker/replay/trace_file.h"
#include "worker/server/kv_recorder.h"

namespace heavywater {

struct TraceRecorderOptions {
  std::string directory;
  std::string model;  // its name, for the header
  int rank = 0;
  // Of all sequences that are being recorded: one that would exceed it is recorded no
  // further, and not written.
  int64_t max_bytes = int64_t{2} << 30;
};

// A model that passes everything on to another and keeps the rows of ComputeQkv. Each
// rank records its own heads, in float32. Not recorded: sequences that go on from a
// snapshot, and those at cache-relative positions, whose rows are not rotated. Used by
// the thread of the step, which says before each step whose rows come.
class TraceRecorder final : public ForwardingModel {
 public:
  TraceRecorder(Model& model, Backend& backend, const KvShape& shape, TraceRecorderOptions options)
      : ForwardingModel(model), backend_(backend), shape_(shape), options_(std::move(options)) {}

  // From here on rows of this sequence are kept.
  void Begin(SequenceId sequence, const SequenceOptions& options);
  void Expect(std::vector<KvRecorder::Rows> rows) { expected_ = std::move(rows); }
  // Writes seq<ID>_rank<R>.trace, if the sequence was recorded to its end, of
  // `tokens_seen` tokens; forgets it. INTERNAL.
  absl::Status End(SequenceId sequence, int64_t tokens_seen);
  void Forget(SequenceId sequence);
  // All of them.
  void Clear();

  int64_t recorded_bytes() const { return bytes_; }

  absl::Status ComputeQkv(int layer, DeviceSpan<const float> hidden,
                          std::span<const Position> positions, DeviceSpan<float> q,
                          DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) override;

 private:
  struct Recorded {
    int64_t prompt_tokens = 0;
    std::vector<TraceLayer> layers;
    int64_t bytes = 0;
  };

  // Rows from the front of `from` to their place in `to`; how many bytes that grew.
  int64_t Keep(std::span<const float> from, int64_t first, int64_t width, std::vector<float>& to);

  Backend& backend_;
  const KvShape shape_;
  const TraceRecorderOptions options_;
  std::vector<KvRecorder::Rows> expected_;
  std::map<SequenceId, Recorded> recorded_;
  int64_t bytes_ = 0;
};

}  // namespace heavywater
