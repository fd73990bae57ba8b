#include "worker/model/gguf_parser.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "cache_service/base/status.h"
#include "worker/model/byte_cursor.h"
#include "worker/model/message.h"

namespace heavywater {
namespace {

constexpr uint32_t kMagic = 0x46554747;  // "GGUF"
// Far above what published models have (some 1,000 tensors, 50 fields, 300,000
// tokens), far below what would exhaust memory.
constexpr uint64_t kMaxFields = 1 << 16;
constexpr uint64_t kMaxTensors = 1 << 16;
constexpr uint64_t kMaxNameBytes = 1 << 16;
constexpr uint64_t kMaxStringBytes = uint64_t{1} << 26;
constexpr uint64_t kMaxArrayElements = uint64_t{1} << 24;
constexpr uint64_t kMaxElements = uint64_t{1} << 40;  // of one tensor
constexpr uint32_t kMaxDimensions = 4;
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxAlignment = 1 << 16;

absl::Status CheckCount(uint64_t count, uint64_t limit, std::string_view what) {
  if (count <= limit) return absl::OkStatus();
  return absl::ResourceExhaustedError(Message(what, " is ", count, ", limit ", limit));
}

template <typename Stored, typename Widened>
absl::Status ReadNumber(ByteCursor& cursor, std::string_view what, GgufValue& value) {
  HW_ASSIGN_OR_RETURN(const Stored stored, cursor.Read<Stored>(what));
  value.value = static_cast<Widened>(stored);
  return absl::OkStatus();
}

absl::Status ReadArray(ByteCursor& cursor, std::string_view what, GgufArray& array) {
  HW_ASSIGN_OR_RETURN(const uint32_t type, cursor.Read<uint32_t>(what));
  array.type = static_cast<GgufType>(type);
  HW_ASSIGN_OR_RETURN(const uint64_t count, cursor.Read<uint64_t>(what));
  HW_RETURN_IF_ERROR(CheckCount(count, kMaxArrayElements, Message("length of ", what)));
  array.count = static_cast<int64_t>(count);
  if (const int bytes = GgufTypeBytes(array.type); bytes > 0) {
    HW_ASSIGN_OR_RETURN(array.numbers, cursor.Take(count * static_cast<uint64_t>(bytes), what));
    return absl::OkStatus();
  }
  if (array.type != GgufType::kString) {
    return absl::InvalidArgumentError(
        Message(what, " is an array of ", GgufTypeName(array.type), ", want numbers or strings"));
  }
  // A string takes at least its length: do not reserve for what cannot be there.
  array.strings.reserve(std::min<uint64_t>(count, cursor.remaining() / sizeof(uint64_t)));
  for (uint64_t i = 0; i < count; ++i) {
    HW_ASSIGN_OR_RETURN(const auto text, cursor.ReadString(kMaxStringBytes, what));
    array.strings.push_back(text);
  }
  return absl::OkStatus();
}

absl::Status ReadValue(ByteCursor& cursor, std::string_view what, GgufValue& value) {
  HW_ASSIGN_OR_RETURN(const uint32_t type, cursor.Read<uint32_t>(what));
  value.type = static_cast<GgufType>(type);
  switch (value.type) {
    case GgufType::kUint8:
      return ReadNumber<uint8_t, uint64_t>(cursor, what, value);
    case GgufType::kInt8:
      return ReadNumber<int8_t, int64_t>(cursor, what, value);
    case GgufType::kUint16:
      return ReadNumber<uint16_t, uint64_t>(cursor, what, value);
    case GgufType::kInt16:
      return ReadNumber<int16_t, int64_t>(cursor, what, value);
    case GgufType::kUint32:
      return ReadNumber<uint32_t, uint64_t>(cursor, what, value);
    case GgufType::kInt32:
      return ReadNumber<int32_t, int64_t>(cursor, what, value);
    case GgufType::kUint64:
      return ReadNumber<uint64_t, uint64_t>(cursor, what, value);
    case GgufType::kInt64:
      return ReadNumber<int64_t, int64_t>(cursor, what, value);
    case GgufType::kFloat32:
      return ReadNumber<float, double>(cursor, what, value);
    case GgufType::kFloat64:
      return ReadNumber<double, double>(cursor, what, value);
    case GgufType::kBool: {
      HW_ASSIGN_OR_RETURN(const uint8_t flag, cursor.Read<uint8_t>(what));
      value.value = flag != 0;
      return absl::OkStatus();
    }
    case GgufType::kString: {
      HW_ASSIGN_OR_RETURN(const std::string_view text, cursor.ReadString(kMaxStringBytes, what));
      value.value = text;
      return absl::OkStatus();
    }
    case GgufType::kArray:
      return ReadArray(cursor, what, value.value.emplace<GgufArray>());
  }
  return absl::InvalidArgumentError(Message(what, " has ", GgufTypeName(value.type)));
}

absl::Status ReadMetadata(ByteCursor& cursor, uint64_t count, GgufContents& contents) {
  for (uint64_t i = 0; i < count; ++i) {
    HW_ASSIGN_OR_RETURN(const auto key,
                        cursor.ReadString(kMaxNameBytes, Message("name of field ", i)));
    const std::string what = Message("field ", Quoted(key));
    const auto [entry, is_new] = contents.metadata.try_emplace(key);
    if (!is_new) return absl::InvalidArgumentError(Message(what, " occurs twice"));
    HW_RETURN_IF_ERROR(ReadValue(cursor, what, entry->second));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint64_t> ReadAlignment(const GgufContents& contents) {
  const auto found = contents.metadata.find("general.alignment");
  if (found == contents.metadata.end()) return kDefaultAlignment;
  const auto* alignment = std::get_if<uint64_t>(&found->second.value);
  if (alignment == nullptr || !std::has_single_bit(*alignment) || *alignment > kMaxAlignment) {
    return absl::InvalidArgumentError(
        Message("field 'general.alignment' is not a power of two up to ", kMaxAlignment));
  }
  return *alignment;
}

// Dimensions, innermost first, to rows of whole blocks.
absl::Status SetShape(std::span<const uint64_t> dimensions, const std::string& what,
                      GgufTensor& tensor) {
  uint64_t elements = 1;
  for (const uint64_t dimension : dimensions) {
    if (dimension == 0 || dimension > kMaxElements / elements) {
      return absl::InvalidArgumentError(Message(what, " has a dimension of ", dimension,
                                                ", want 1 or more and at most ", kMaxElements,
                                                " elements in all"));
    }
    elements *= dimension;
  }
  const auto block = TensorBlockOf(tensor.type);
  if (!block.has_value()) {
    return absl::UnimplementedError(Message(what, " has type ", TensorTypeName(tensor.type),
                                            ", want one of ", SupportedTensorTypes()));
  }
  tensor.row_elements = static_cast<int64_t>(dimensions[0]);
  if (tensor.row_elements % block->elements != 0) {
    return absl::InvalidArgumentError(Message(what, " has rows of ", tensor.row_elements,
                                              ", want a multiple of ", block->elements));
  }
  tensor.rows = static_cast<int64_t>(elements / dimensions[0]);
  tensor.row_bytes = tensor.row_elements / block->elements * block->bytes;
  return absl::OkStatus();
}

struct TensorEntry {
  GgufTensor tensor;
  uint64_t offset = 0;  // from the start of the data
};

absl::StatusOr<TensorEntry> ReadTensor(ByteCursor& cursor, uint64_t index) {
  TensorEntry entry;
  HW_ASSIGN_OR_RETURN(entry.tensor.name,
                      cursor.ReadString(kMaxNameBytes, Message("name of tensor ", index)));
  const std::string what = Message("tensor ", Quoted(entry.tensor.name));
  HW_ASSIGN_OR_RETURN(const uint32_t num_dimensions, cursor.Read<uint32_t>(what));
  if (num_dimensions < 1 || num_dimensions > kMaxDimensions) {
    return absl::InvalidArgumentError(
        Message(what, " has ", num_dimensions, " dimensions, want 1 to ", kMaxDimensions));
  }
  std::array<uint64_t, kMaxDimensions> dimensions{};
  for (uint32_t i = 0; i < num_dimensions; ++i) {
    HW_ASSIGN_OR_RETURN(dimensions[i], cursor.Read<uint64_t>(what));
  }
  HW_ASSIGN_OR_RETURN(const uint32_t type, cursor.Read<uint32_t>(what));
  entry.tensor.type = static_cast<TensorType>(type);
  HW_ASSIGN_OR_RETURN(entry.offset, cursor.Read<uint64_t>(what));
  HW_RETURN_IF_ERROR(SetShape(std::span(dimensions).first(num_dimensions), what, entry.tensor));
  return entry;
}

// Cuts the tensor's bytes out of `data`.
absl::Status Place(std::span<const std::byte> data, uint64_t alignment, TensorEntry& entry) {
  GgufTensor& tensor = entry.tensor;
  const std::string what = Message("tensor ", Quoted(tensor.name));
  if (entry.offset % alignment != 0) {
    return absl::InvalidArgumentError(
        Message(what, " is at offset ", entry.offset, ", want a multiple of ", alignment));
  }
  // rows * row_bytes is at most 4 * kMaxElements: no overflow.
  const auto bytes = static_cast<uint64_t>(tensor.rows) * static_cast<uint64_t>(tensor.row_bytes);
  if (entry.offset > data.size() || bytes > data.size() - entry.offset) {
    return absl::DataLossError(Message(what, " has ", bytes, " bytes at offset ", entry.offset,
                                       ", but the file has only ", data.size(),
                                       " bytes of tensors"));
  }
  tensor.data = data.subspan(static_cast<size_t>(entry.offset), static_cast<size_t>(bytes));
  return absl::OkStatus();
}

absl::Status ReadTensors(std::span<const std::byte> file, ByteCursor& cursor, uint64_t count,
                         GgufContents& contents) {
  HW_ASSIGN_OR_RETURN(const uint64_t alignment, ReadAlignment(contents));
  std::vector<TensorEntry> entries;
  for (uint64_t i = 0; i < count; ++i) {
    HW_ASSIGN_OR_RETURN(auto entry, ReadTensor(cursor, i));
    entries.push_back(entry);
  }
  contents.header_bytes = static_cast<int64_t>(cursor.offset());
  const size_t data_start =
      std::min<size_t>((cursor.offset() + alignment - 1) / alignment * alignment, file.size());
  for (TensorEntry& entry : entries) {
    HW_RETURN_IF_ERROR(Place(file.subspan(data_start), alignment, entry));
    if (!contents.tensors.emplace(entry.tensor.name, entry.tensor).second) {
      return absl::InvalidArgumentError(
          Message("tensor ", Quoted(entry.tensor.name), " occurs twice"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<GgufContents> ParseGguf(std::span<const std::byte> file) {
  ByteCursor cursor(file);
  HW_ASSIGN_OR_RETURN(const uint32_t magic, cursor.Read<uint32_t>("magic"));
  if (magic != kMagic) return absl::InvalidArgumentError("not a GGUF file: it begins otherwise");
  HW_ASSIGN_OR_RETURN(const uint32_t version, cursor.Read<uint32_t>("version"));
  if (version != 2 && version != 3) {
    return absl::UnimplementedError(Message("GGUF version is ", version, ", want 2 or 3"));
  }
  HW_ASSIGN_OR_RETURN(const uint64_t num_tensors, cursor.Read<uint64_t>("number of tensors"));
  HW_RETURN_IF_ERROR(CheckCount(num_tensors, kMaxTensors, "number of tensors"));
  HW_ASSIGN_OR_RETURN(const uint64_t num_fields, cursor.Read<uint64_t>("number of fields"));
  HW_RETURN_IF_ERROR(CheckCount(num_fields, kMaxFields, "number of fields"));

  GgufContents contents;
  HW_RETURN_IF_ERROR(ReadMetadata(cursor, num_fields, contents));
  HW_RETURN_IF_ERROR(ReadTensors(file, cursor, num_tensors, contents));
  return contents;
}

}  // namespace heavywater
