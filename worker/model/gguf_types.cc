#include "worker/model/gguf_types.h"

#include <algorithm>
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

struct BlockEntry {
  TensorType type;
  TensorBlock block;
};

// All types that dequantize.cc knows.
constexpr std::array<BlockEntry, 11> kBlocks = {{{TensorType::kF32, {1, 4}},
                                                 {TensorType::kF16, {1, 2}},
                                                 {TensorType::kBF16, {1, 2}},
                                                 {TensorType::kQ8_0, {32, 34}},
                                                 {TensorType::kQ4_0, {32, 18}},
                                                 {TensorType::kQ4_1, {32, 20}},
                                                 {TensorType::kQ5_0, {32, 22}},
                                                 {TensorType::kQ5_1, {32, 24}},
                                                 {TensorType::kQ4_K, {256, 144}},
                                                 {TensorType::kQ5_K, {256, 176}},
                                                 {TensorType::kQ6_K, {256, 210}}}};

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
  const auto* const found = std::ranges::find(kBlocks, type, &BlockEntry::type);
  if (found == kBlocks.end()) return std::nullopt;
  return found->block;
}

std::string SupportedTensorTypes() {
  std::string names;
  for (const BlockEntry& entry : kBlocks) {
    if (!names.empty()) names += ", ";
    names += TensorTypeName(entry.type);
  }
  return names;
}

std::string TensorTypeName(TensorType type) {
  const auto index = static_cast<size_t>(type);
  if (index < kTensorTypeNames.size() && !kTensorTypeNames[index].empty()) {
    return std::string(kTensorTypeNames[index]);
  }
  return Message("unknown type ", index);
}

}  // namespace heavywater
