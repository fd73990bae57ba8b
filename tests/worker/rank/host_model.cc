#include "tests/worker/rank/host_model.h"

#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"

namespace heavywater {
namespace {

DeviceSpan<float> SpanOf(std::vector<float>& values) {
  return {values.data(), static_cast<int64_t>(values.size())};
}

}  // namespace

absl::StatusOr<std::vector<float>> HostModel::Fetch(DeviceSpan<const float> from, Stream& stream) {
  std::vector<float> to(from.size());
  HW_RETURN_IF_ERROR(
      backend_.CopyToHost(std::as_writable_bytes(std::span(to)), DeviceBytes(from), stream));
  HW_RETURN_IF_ERROR(backend_.Synchronize(stream));
  return to;
}

absl::Status HostModel::Store(const std::vector<float>& from, DeviceSpan<float> to,
                              Stream& stream) {
  return backend_.CopyToDevice(DeviceBytes(to), std::as_bytes(std::span(from)), stream);
}

absl::Status HostModel::Embed(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                              Stream& stream) {
  std::vector<float> rows(hidden.size());
  HW_RETURN_IF_ERROR(inner_.Embed(tokens, SpanOf(rows), stream));
  return Store(rows, hidden, stream);
}

absl::Status HostModel::ComputeQkv(int layer, DeviceSpan<const float> hidden,
                                   std::span<const Position> positions, DeviceSpan<float> q,
                                   DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) {
  HW_ASSIGN_OR_RETURN(std::vector<float> rows, Fetch(hidden, stream));
  std::vector<float> queries(q.size());
  std::vector<float> keys(k.size());
  std::vector<float> values(v.size());
  HW_RETURN_IF_ERROR(inner_.ComputeQkv(layer, SpanOf(rows), positions, SpanOf(queries),
                                       SpanOf(keys), SpanOf(values), stream));
  HW_RETURN_IF_ERROR(Store(queries, q, stream));
  HW_RETURN_IF_ERROR(Store(keys, k, stream));
  return Store(values, v, stream);
}

absl::Status HostModel::FinishLayer(int layer, DeviceSpan<const float> attention,
                                    DeviceSpan<float> hidden, Stream& stream) {
  HW_ASSIGN_OR_RETURN(std::vector<float> attended, Fetch(attention, stream));
  HW_ASSIGN_OR_RETURN(std::vector<float> rows, Fetch(hidden, stream));
  HW_RETURN_IF_ERROR(inner_.FinishLayer(layer, SpanOf(attended), SpanOf(rows), stream));
  return Store(rows, hidden, stream);
}

absl::Status HostModel::ComputeLogits(DeviceSpan<const float> hidden, DeviceSpan<float> logits,
                                      Stream& stream) {
  HW_ASSIGN_OR_RETURN(std::vector<float> rows, Fetch(hidden, stream));
  std::vector<float> out(logits.size());
  HW_RETURN_IF_ERROR(inner_.ComputeLogits(SpanOf(rows), SpanOf(out), stream));
  return Store(out, logits, stream);
}

}  // namespace heavywater
