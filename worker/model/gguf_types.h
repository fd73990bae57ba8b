// The types of GGUF files (ggml's model format, version 2 and 3) that this
// reader understands.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace heavywater {

// Of a metadata value, numbered as in the file.
enum class GgufType : uint32_t {
  kUint8 = 0,
  kInt8 = 1,
  kUint16 = 2,
  kInt16 = 3,
  kUint32 = 4,
  kInt32 = 5,
  kFloat32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kUint64 = 10,
  kInt64 = 11,
  kFloat64 = 12,
};

// "uint32", "string", ...; "unknown type 42".
std::string GgufTypeName(GgufType type);
// Bytes of one value; 0 for strings, arrays and unknown types.
int GgufTypeBytes(GgufType type);

// Of a tensor's elements, numbered as in the file. Rows are stored in blocks of
// `elements` values in `bytes` bytes.
enum class TensorType : uint32_t {
  kF32 = 0,
  kF16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kBF16 = 30,
};

struct TensorBlock {
  int elements = 0;
  int bytes = 0;
};

// Empty for types that this project cannot dequantise.
std::optional<TensorBlock> TensorBlockOf(TensorType type);
// ggml's name ("Q4_1"), also of the types that are not supported.
std::string TensorTypeName(TensorType type);
// The names of all types that can be dequantised, for messages: "F32, F16, ...".
std::string SupportedTensorTypes();

// An array in the metadata. Views into the file.
struct GgufArray {
  GgufType type = GgufType::kUint8;
  int64_t count = 0;
  std::span<const std::byte> numbers;     // count values, unaligned; empty for strings
  std::vector<std::string_view> strings;  // [count]; empty for numbers
};

// All integers are widened. Strings and arrays are views into the file.
struct GgufValue {
  GgufType type = GgufType::kUint8;
  std::variant<uint64_t, int64_t, double, bool, std::string_view, GgufArray> value;
};

// A tensor as a matrix [rows][row_elements]; a vector has one row. In GGUF's terms
// whatever file it lies in (model_file.h).
struct GgufTensor {
  std::string_view name;
  TensorType type = TensorType::kF32;
  int64_t rows = 0;
  int64_t row_elements = 0;
  int64_t row_bytes = 0;
  std::span<const std::byte> data;  // [rows][row_bytes], in the file

  std::span<const std::byte> row(int64_t index) const {
    return data.subspan(static_cast<size_t>(index * row_bytes), static_cast<size_t>(row_bytes));
  }
};

}  // namespace heavywater
