#include "worker/server/kv_recorder.h"

#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "nlohmann/json.hpp"
#include "worker/cache/kv_element.h"
#include "worker/cache/read_device.h"

namespace heavywater {
namespace {

nlohmann::json SlotTables(const PlanReport& report, const KvShape& shape, int rank, int64_t plan) {
  nlohmann::json json = {{"sequence_id", report.sequence},
                         {"rank", rank},
                         {"plan", plan},
                         {"tokens_seen", report.tokens_seen},
                         {"dtype", std::string(KvDtypeName(shape.dtype))},
                         {"num_layers", shape.num_layers},
                         {"first_kv_head", shape.first_kv_head},
                         {"num_kv_heads", shape.num_kv_heads},
                         {"head_dim", shape.head_dim},
                         {"row_bytes", shape.row_bytes()},
                         {"sets", nlohmann::json::array()}};
  for (const ResidentSet& set : report.sets) {
    json["sets"].push_back({{"layer", set.layer},
                            {"kv_head", set.kv_head},
                            {"positions", set.positions},
                            {"scores", set.scores}});
  }
  return json;
}

}  // namespace

absl::Status KvRecorder::ComputeQkv(int layer, DeviceSpan<const float> hidden,
                                    std::span<const Position> positions, DeviceSpan<float> q,
                                    DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) {
  HW_RETURN_IF_ERROR(ForwardingModel::ComputeQkv(layer, hidden, positions, q, k, v, stream));
  HW_ASSIGN_OR_RETURN(const std::vector<float> keys, ReadDevice(k, backend_, stream));
  HW_ASSIGN_OR_RETURN(const std::vector<float> values, ReadDevice(v, backend_, stream));
  const size_t row = static_cast<size_t>(shape_.num_kv_heads) * shape_.head_dim;
  size_t first = 0;
  for (const Rows& rows : expected_) {
    const size_t count = static_cast<size_t>(rows.count) * row;
    HW_CHECK((first + count) <= keys.size());
    Record(layer, rows, std::span(keys).subspan(first, count),
           std::span(values).subspan(first, count));
    first += count;
  }
  return absl::OkStatus();
}

void KvRecorder::Record(int layer, const Rows& rows, std::span<const float> k,
                        std::span<const float> v) {
  auto& layers = recorded_[rows.sequence];
  layers.resize(static_cast<size_t>(shape_.num_layers));
  LayerRows& to = layers[static_cast<size_t>(layer)];
  const size_t row_bytes = static_cast<size_t>(shape_.row_bytes());
  const size_t heads = static_cast<size_t>(shape_.num_kv_heads);
  const size_t first = static_cast<size_t>(rows.first_position) * heads;
  const size_t count = static_cast<size_t>(rows.count) * heads;
  // A step that failed is repeated at the same positions.
  to.resize(std::max(to.size(), (first + count) * row_bytes));
  const size_t head_dim = static_cast<size_t>(shape_.head_dim);
  for (size_t i = 0; i < count; ++i) {
    std::byte* at = to.data() + (first + i) * row_bytes;
    Store(k.subspan(i * head_dim, head_dim), at);
    Store(v.subspan(i * head_dim, head_dim), at + row_bytes / 2);
  }
}

void KvRecorder::Store(std::span<const float> vector, std::byte* to) const {
  StoreKvRow(shape_.dtype, vector, to);
}

absl::Status KvRecorder::Dump(const std::string& directory, int rank, int64_t plan,
                              const PlanReport& report) const {
  const std::string stem = absl::StrCat(directory, "/seq", report.sequence, "_rank", rank);
  std::ofstream kv(stem + ".kv", std::ios::binary);
  const auto found = recorded_.find(report.sequence);
  const size_t row_bytes = static_cast<size_t>(shape_.row_bytes());
  const size_t heads = static_cast<size_t>(shape_.num_kv_heads);
  for (size_t layer = 0; found != recorded_.end() && layer < found->second.size(); ++layer) {
    const LayerRows& rows = found->second[layer];
    HW_CHECK(rows.size() >= static_cast<size_t>(report.tokens_seen) * heads * row_bytes);
    for (size_t head = 0; head < heads; ++head) {
      for (size_t position = 0; position < static_cast<size_t>(report.tokens_seen); ++position) {
        const std::byte* row = rows.data() + (position * heads + head) * row_bytes;
        kv.write(reinterpret_cast<const char*>(row), static_cast<std::streamsize>(row_bytes));
      }
    }
  }
  kv.close();
  // Last, and whole when it appears under its name: whoever waits for it finds both.
  std::ofstream json(stem + ".part");
  json << SlotTables(report, shape_, rank, plan).dump() << "\n";
  json.close();
  std::error_code failure;
  std::filesystem::rename(stem + ".part", stem + ".json", failure);
  if (!json || !kv || failure) {
    return absl::InternalError(absl::StrCat("cannot write ", stem, ".json and .kv"));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
