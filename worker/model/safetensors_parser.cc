#include "worker/model/safetensors_parser.h"

#include <algorithm>
#include <optional>
#include <string_view>

#include "cache_service/base/status.h"
#include "worker/model/byte_cursor.h"
#include "worker/model/json_fields.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMaxHeaderBytes = uint64_t{64} << 20;
constexpr size_t kMaxTensors = 1 << 16;
constexpr uint64_t kMaxElements = uint64_t{1} << 40;  // of one tensor
constexpr std::string_view kMetadata = "__metadata__";

std::optional<TensorType> TypeNamed(std::string_view name) {
  if (name == "F32") return TensorType::kF32;
  if (name == "F16") return TensorType::kF16;
  if (name == "BF16") return TensorType::kBF16;
  return std::nullopt;
}

absl::Status SetType(const JsonFields& fields, const std::string& what, GgufTensor& tensor) {
  HW_ASSIGN_OR_RETURN(const std::string name, fields.Text("dtype"));
  const auto type = TypeNamed(name);
  if (!type.has_value()) {
    return absl::UnimplementedError(
        Message(what, " has type ", Quoted(name), ", want one of F32, F16, BF16"));
  }
  tensor.type = *type;
  return absl::OkStatus();
}

absl::Status SetShape(const JsonFields& fields, const std::string& what, GgufTensor& tensor) {
  const Json* shape = fields.Find("shape");
  if (shape == nullptr || !shape->is_array()) {
    return absl::InvalidArgumentError(Message(what, " has no shape, want a list of sizes"));
  }
  if (shape->empty() || shape->size() > 2) {
    return absl::UnimplementedError(
        Message(what, " has ", shape->size(), " dimensions, want 1 or 2"));
  }
  uint64_t elements = 1;
  for (const Json& size : *shape) {
    const uint64_t value = size.is_number_unsigned() ? size.get<uint64_t>() : 0;
    if (value == 0 || value > kMaxElements / elements) {
      return absl::InvalidArgumentError(Message(what,
                                                " has a dimension that is no size, want 1 or "
                                                "more and at most ",
                                                kMaxElements, " elements in all"));
    }
    elements *= value;
  }
  tensor.row_elements = static_cast<int64_t>(shape->back().get<uint64_t>());
  tensor.rows = static_cast<int64_t>(elements) / tensor.row_elements;
  tensor.row_bytes = tensor.row_elements * TensorBlockOf(tensor.type)->bytes;
  return absl::OkStatus();
}

// Cuts the tensor's bytes out of `data`.
absl::Status Place(const JsonFields& fields, const std::string& what,
                   std::span<const std::byte> data, GgufTensor& tensor) {
  const Json* offsets = fields.Find("data_offsets");
  if (offsets == nullptr || !offsets->is_array() || offsets->size() != 2 ||
      !(*offsets)[0].is_number_unsigned() || !(*offsets)[1].is_number_unsigned()) {
    return absl::InvalidArgumentError(Message(what, " has no data_offsets, want [begin, end]"));
  }
  const auto begin = (*offsets)[0].get<uint64_t>();
  const auto end = (*offsets)[1].get<uint64_t>();
  // At most 4 * kMaxElements: no overflow.
  const auto bytes = static_cast<uint64_t>(tensor.rows) * static_cast<uint64_t>(tensor.row_bytes);
  if (end < begin || end - begin != bytes) {
    return absl::InvalidArgumentError(
        Message(what, " lies at [", begin, ", ", end, "), but its shape takes ", bytes, " bytes"));
  }
  if (end > data.size()) {
    return absl::DataLossError(Message(what, " ends at offset ", end, ", but the file has only ",
                                       data.size(), " bytes of tensors"));
  }
  tensor.data = data.subspan(static_cast<size_t>(begin), static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status ParseTensor(const Json& json, std::span<const std::byte> data, GgufTensor& tensor) {
  const std::string what = Message("tensor ", Quoted(tensor.name));
  if (!json.is_object()) return absl::InvalidArgumentError(Message(what, " is no object"));
  const JsonFields fields(json, Message(tensor.name, "."));
  HW_RETURN_IF_ERROR(SetType(fields, what, tensor));
  HW_RETURN_IF_ERROR(SetShape(fields, what, tensor));
  return Place(fields, what, data, tensor);
}

// Tensors lie one behind the other and leave nothing out: what overlaps or hides bytes was
// not written by any library.
absl::Status CheckOrder(const std::vector<GgufTensor>& tensors, std::span<const std::byte> data) {
  std::vector<const GgufTensor*> order;
  for (const GgufTensor& tensor : tensors) order.push_back(&tensor);
  std::ranges::sort(order, {}, [](const GgufTensor* tensor) { return tensor->data.data(); });
  const std::byte* next = data.data();
  for (const GgufTensor* tensor : order) {
    if (tensor->data.data() != next) {
      return absl::InvalidArgumentError(Message("tensor ", Quoted(tensor->name), " is at offset ",
                                                tensor->data.data() - data.data(), ", want ",
                                                next - data.data(), ", where the one before ends"));
    }
    next += tensor->data.size();
  }
  const int64_t left = data.data() + data.size() - next;
  if (left == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(Message(left, " bytes behind the last tensor, want none"));
}

absl::StatusOr<Json> ParseHeader(ByteCursor& cursor) {
  HW_ASSIGN_OR_RETURN(const uint64_t bytes, cursor.Read<uint64_t>("length of the header"));
  if (bytes > kMaxHeaderBytes) {
    return absl::ResourceExhaustedError(
        Message("length of the header is ", bytes, ", limit ", kMaxHeaderBytes));
  }
  HW_ASSIGN_OR_RETURN(const auto text, cursor.Take(bytes, "header"));
  auto header = ParseJsonObject({reinterpret_cast<const char*>(text.data()), text.size()});
  if (header.ok()) return header;
  return absl::InvalidArgumentError(Message("header: ", header.status().message()));
}

}  // namespace

absl::StatusOr<SafetensorsContents> ParseSafetensors(std::span<const std::byte> file) {
  ByteCursor cursor(file);
  HW_ASSIGN_OR_RETURN(const Json header, ParseHeader(cursor));
  if (header.size() > kMaxTensors) {
    return absl::ResourceExhaustedError(
        Message("number of tensors is ", header.size(), ", limit ", kMaxTensors));
  }
  const std::span<const std::byte> data = file.subspan(cursor.offset());
  SafetensorsContents contents;
  contents.header_bytes = static_cast<int64_t>(cursor.offset());
  for (const auto& [name, value] : header.items()) {  // sorted
    if (name == kMetadata) continue;
    contents.names.push_back(std::make_unique<const std::string>(name));
    GgufTensor& tensor = contents.tensors.emplace_back();
    tensor.name = *contents.names.back();
    HW_RETURN_IF_ERROR(ParseTensor(value, data, tensor));
  }
  HW_RETURN_IF_ERROR(CheckOrder(contents.tensors, data));
  return contents;
}

}  // namespace heavywater
