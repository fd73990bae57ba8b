#include "worker/server/trace_recorder.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/cache/read_device.h"

namespace heavywater {

void TraceRecorder::Begin(SequenceId sequence, const SequenceOptions& options) {
  if (options.policy.positions != Positions::kAbsolute) return;
  Recorded& recorded = recorded_[sequence];
  recorded.prompt_tokens = options.prompt_tokens;
  recorded.layers.resize(static_cast<size_t>(shape_.num_layers));
}

absl::Status TraceRecorder::ComputeQkv(int layer, DeviceSpan<const float> hidden,
                                       std::span<const Position> positions, DeviceSpan<float> q,
                                       DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) {
  HW_RETURN_IF_ERROR(ForwardingModel::ComputeQkv(layer, hidden, positions, q, k, v, stream));
  if (recorded_.empty()) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(const std::vector<float> queries, ReadDevice(q, backend_, stream));
  HW_ASSIGN_OR_RETURN(const std::vector<float> keys, ReadDevice(k, backend_, stream));
  HW_ASSIGN_OR_RETURN(const std::vector<float> values, ReadDevice(v, backend_, stream));
  const int64_t query_width = int64_t{shape_.num_query_heads} * shape_.head_dim;
  const int64_t kv_width = int64_t{shape_.num_kv_heads} * shape_.head_dim;
  int64_t row = 0;
  for (const KvRecorder::Rows& rows : expected_) {
    const int64_t first_row = row;
    row += rows.count;
    HW_CHECK(row * query_width <= static_cast<int64_t>(queries.size()));
    const auto found = recorded_.find(rows.sequence);
    if (found == recorded_.end()) continue;
    const auto part = [&](const std::vector<float>& all, int64_t width) {
      return std::span(all).subspan(first_row * width, rows.count * width);
    };
    Recorded& recorded = found->second;
    TraceLayer& to = recorded.layers[static_cast<size_t>(layer)];
    const int64_t grown = Keep(part(queries, query_width), rows.first_position, query_width, to.q) +
                          Keep(part(keys, kv_width), rows.first_position, kv_width, to.k) +
                          Keep(part(values, kv_width), rows.first_position, kv_width, to.v);
    recorded.bytes += grown;
    bytes_ += grown;
    if (bytes_ > options_.max_bytes) Forget(rows.sequence);
  }
  return absl::OkStatus();
}

int64_t TraceRecorder::Keep(std::span<const float> from, int64_t first, int64_t width,
                            std::vector<float>& to) {
  const size_t before = to.size();
  // A step that failed is repeated at the same positions.
  to.resize(std::max(before, static_cast<size_t>(first * width) + from.size()));
  std::copy(from.begin(), from.end(), to.begin() + first * width);
  return static_cast<int64_t>((to.size() - before) * sizeof(float));
}

absl::Status TraceRecorder::End(SequenceId sequence, int64_t tokens_seen) {
  const auto found = recorded_.find(sequence);
  if (found == recorded_.end()) return absl::OkStatus();
  Trace trace;
  trace.shape = {.num_layers = shape_.num_layers,
                 .num_query_heads = shape_.num_query_heads,
                 .num_kv_heads = shape_.num_kv_heads,
                 .head_dim = shape_.head_dim,
                 .num_tokens = tokens_seen,
                 .prompt_tokens = found->second.prompt_tokens,
                 .model = options_.model};
  trace.layers = std::move(found->second.layers);
  for (TraceLayer& layer : trace.layers) {  // what a failed step left at the end
    layer.q.resize(static_cast<size_t>(tokens_seen * trace.shape.query_width()));
    layer.k.resize(static_cast<size_t>(tokens_seen * trace.shape.kv_width()));
    layer.v.resize(static_cast<size_t>(tokens_seen * trace.shape.kv_width()));
  }
  Forget(sequence);
  return WriteTrace(
      absl::StrCat(options_.directory, "/seq", sequence, "_rank", options_.rank, ".trace"), trace);
}

void TraceRecorder::Clear() {
  recorded_.clear();
  bytes_ = 0;
}

void TraceRecorder::Forget(SequenceId sequence) {
  const auto found = recorded_.find(sequence);
  if (found == recorded_.end()) return;
  bytes_ -= found->second.bytes;
  recorded_.erase(found);
}

}  // namespace heavywater
