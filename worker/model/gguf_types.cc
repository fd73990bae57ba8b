#include "worker/model/gguf_types.h"

#include <array>

#include "worker/model/message.h"

namespace heavywater {
namespace {

struct TypeEntry {
  std::string_view name;
  int bytes;
};

constexpr std::array<TypeEntry, 13> kTypes = {{{"uint8", 1},
                                               {"int8", 1},
                                               {"uint16", 2},
                                               {"int16", 2},
                                               {"uint32", 4},
                                               {"int32", 4},
                                               {"float32", 4},
                                               {"bool", 1},
                                               {"string", 0},
                                               {"array", 0},
                                               {"uint64", 8},
                                               {"int64", 8},
                                               {"float64", 8}}};

// ggml's numbering; gaps are types that it has withdrawn.
constexpr std::array<std::string_view, 31> kTensorTypeNames = {
    "F32",     "F16",    "Q4_0",    "Q4_1",  "",       "",      "Q5_0",  "Q5_1",
    "Q8_0",    "Q8_1",   "Q2_K",    "Q3_K",  "Q4_K",   "Q5_K",  "Q6_K",  "Q8_K",
    "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S", "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS",
    "I8",      "I16",    "I32",     "I64",   "F64",    "IQ1_M", "BF16"};

}  // namespace

std::string GgufTypeName(GgufType type) {
  const auto index = static_cast<size_t>(type);
  if (index < kTypes.size()) return std::string(kTypes[index].name);
  return Message("unknown type ", index);
}

int GgufTypeBytes(GgufType type) {
  const auto index = static_cast<size_t>(type);
  return index < kTypes.size() ? kTypes[index].bytes : 0;
}

std::optional<TensorBlock> TensorBlockOf(TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return TensorBlock{1, 4};
    case TensorType::kF16:
      return TensorBlock{1, 2};
    case TensorType::kQ4_1:
      return TensorBlock{32, 20};
    case TensorType::kQ8_0:
      return TensorBlock{32, 34};
  }
  return std::nullopt;
}

std::string TensorTypeName(TensorType type) {
  const auto index = static_cast<size_t>(type);
  if (index < kTensorTypeNames.size() && !kTensorTypeNames[index].empty()) {
    return std::string(kTensorTypeNames[index]);
  }
  return Message("unknown type ", index);
}

}  // namespace heavywater
