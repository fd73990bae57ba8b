#include "worker/model/packed_rows.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cache_service/base/check.h"
#include "worker/model/dequantize.h"
#include "worker/model/quant_groups.h"

namespace heavywater {
namespace {

constexpr int64_t kGroup = kQuantGroup;
using Groups = std::vector<QuantGroup>;

// The codec that holds a type's blocks one by one.
RowCodec NaturalCodec(TensorType type) {
  switch (type) {
    case TensorType::kF32:
      return RowCodec::kFloat32;
    case TensorType::kF16:
      return RowCodec::kFloat16;
    case TensorType::kBF16:
      return RowCodec::kBFloat16;
    case TensorType::kQ4_0:
    case TensorType::kQ4_1:
    case TensorType::kQ4_K:
      return RowCodec::kAffine4;
    case TensorType::kQ8_0:
      return RowCodec::kScaled8;
    case TensorType::kQ6_K:
      return RowCodec::kScaled8x16;
    case TensorType::kQ5_0:
    case TensorType::kQ5_1:
    case TensorType::kQ5_K:
      return RowCodec::kAffine8;
  }
  return RowCodec::kFloat32;
}

bool HasScales(RowCodec codec) {
  return codec == RowCodec::kAffine4 || codec == RowCodec::kScaled8 ||
         codec == RowCodec::kScaled8x16 || codec == RowCodec::kAffine8;
}

Groups ReadGroups(const GgufTensor& tensor, int64_t row, const Range& columns) {
  const TensorBlock block = TensorBlockOf(tensor.type).value();
  const int64_t first = columns.begin / block.elements;  // whole blocks around the columns
  const int64_t end = (columns.begin + columns.size + block.elements - 1) / block.elements;
  Groups groups(static_cast<size_t>((end - first) * block.elements / kGroup));
  ReadQuantGroups(tensor.type, tensor.row(row).data() + first * block.bytes, groups);
  const int64_t before = (columns.begin - first * block.elements) / kGroup;
  groups.erase(groups.begin(), groups.begin() + before);
  groups.resize(static_cast<size_t>(columns.size / kGroup));
  return groups;
}

template <typename T>
std::byte* Put(const T& value, std::byte* to) {
  std::memcpy(to, &value, sizeof(value));
  return to + sizeof(value);
}

void WriteAffine4(const Groups& groups, std::byte* to) {
  for (size_t i = 0; i < groups.size(); i += 2) {
    to = Put(groups[i].minimum, Put(groups[i].scale, to));
    for (size_t j = 0; j < kGroup; ++j) {
      to = Put(static_cast<uint8_t>(groups[i].codes[j] | groups[i + 1].codes[j] << 4), to);
    }
  }
}

// A scale before every `groups_per_block` groups.
void WriteScaled8(const Groups& groups, size_t groups_per_block, std::byte* to) {
  for (size_t i = 0; i < groups.size(); ++i) {
    if (i % groups_per_block == 0) to = Put(groups[i].scale, to);
    to = Put(groups[i].codes, to);
  }
}

void WriteAffine8(const Groups& groups, std::byte* to) {
  for (const QuantGroup& group : groups) {
    to = Put(group.codes, Put(group.minimum, Put(group.scale, to)));
  }
}

void PackGroups(const Groups& groups, RowCodec codec, std::byte* to) {
  switch (codec) {
    case RowCodec::kAffine4:
      return WriteAffine4(groups, to);
    case RowCodec::kScaled8:
      return WriteScaled8(groups, 2, to);
    case RowCodec::kScaled8x16:
      return WriteScaled8(groups, 1, to);
    default:
      return WriteAffine8(groups, to);
  }
}

void PackFloats(const GgufTensor& tensor, int64_t row, const Range& columns, std::byte* to) {
  std::vector<float> values(static_cast<size_t>(tensor.row_elements));
  DequantizeRows(tensor, row, 1, values);
  std::memcpy(to, values.data() + columns.begin, static_cast<size_t>(columns.size) * sizeof(float));
}

}  // namespace

CodecBlock CodecBlockOf(RowCodec codec) {
  constexpr auto kNumber = static_cast<int64_t>(sizeof(float));
  switch (codec) {
    case RowCodec::kFloat32:
      return {1, kNumber};
    case RowCodec::kFloat16:
    case RowCodec::kBFloat16:
      return {2 * kGroup, 4 * kGroup};
    case RowCodec::kAffine4:
      return {2 * kGroup, 2 * kNumber + kGroup};
    case RowCodec::kScaled8:
      return {2 * kGroup, kNumber + 2 * kGroup};
    case RowCodec::kScaled8x16:
      return {kGroup, kNumber + kGroup};
    case RowCodec::kAffine8:
      return {kGroup, 2 * kNumber + kGroup};
  }
  return {};
}

std::string_view RowCodecName(RowCodec codec) {
  switch (codec) {
    case RowCodec::kFloat32:
      return "fp32";
    case RowCodec::kFloat16:
      return "fp16";
    case RowCodec::kBFloat16:
      return "bf16";
    case RowCodec::kAffine4:
      return "affine4";
    case RowCodec::kScaled8:
      return "scaled8";
    case RowCodec::kScaled8x16:
      return "scaled8x16";
    case RowCodec::kAffine8:
      return "affine8";
  }
  return "unknown";
}

int64_t PackedRowBytes(RowCodec codec, int64_t cols) {
  const CodecBlock block = CodecBlockOf(codec);
  HW_CHECK(cols % block.elements == 0);
  return cols / block.elements * block.bytes;
}

RowCodec CodecFor(const GgufTensor& tensor, const Range& columns) {
  const RowCodec codec = NaturalCodec(tensor.type);
  const int64_t kept = CodecBlockOf(codec).elements;
  const bool begins = !HasScales(codec) || columns.begin % kept == 0;
  return begins && columns.size % kept == 0 ? codec : RowCodec::kFloat32;
}

RowCodec CommonCodec(RowCodec a, RowCodec b) {
  if (a == b) return a;
  return HasScales(a) && HasScales(b) ? RowCodec::kAffine8 : RowCodec::kFloat32;
}

void PackRow(const GgufTensor& tensor, int64_t row, const Range& columns, RowCodec codec,
             std::byte* to) {
  HW_CHECK(row >= 0 && row < tensor.rows);
  HW_CHECK(columns.begin >= 0 && columns.begin + columns.size <= tensor.row_elements);
  if (codec == RowCodec::kFloat32) return PackFloats(tensor, row, columns, to);
  if (HasScales(codec)) return PackGroups(ReadGroups(tensor, row, columns), codec, to);
  const auto bytes = static_cast<size_t>(PackedRowBytes(codec, columns.size));
  std::memcpy(to, tensor.row(row).data() + columns.begin * 2, bytes);
}

}  // namespace heavywater
