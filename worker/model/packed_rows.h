// How the rows of a weight matrix are kept in memory: as floats, or in the blocks
// of a few bits in which files store them. A packed element stands for exactly the
// float that dequantize.h gives. With it results are the same bits for up to 16 tokens; above
// (matmul.h) sums are cut elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "worker/model/gguf_types.h"
#include "worker/model/rank_shard.h"

namespace heavywater {

// A block's value i is code[i] * scale + minimum, rounded once; numbers are float32.
enum class RowCodec {
  kFloat32,
  kFloat16,
  kBFloat16,
  kAffine4,     // 32 values: scale, minimum, 16 bytes; low nibbles, then high ones
  kScaled8,     // 32 values: scale, 32 signed codes
  kScaled8x16,  // 16 values: scale, 16 signed codes
  kAffine8,     // 16 values: scale, minimum, 16 signed codes; holds any of the three above
};

struct CodecBlock {
  int64_t elements = 0;
  int64_t bytes = 0;
};
CodecBlock CodecBlockOf(RowCodec codec);
std::string_view RowCodecName(RowCodec codec);

// `cols` must be whole blocks.
int64_t PackedRowBytes(RowCodec codec, int64_t cols);

// The smallest codec that holds the tensor's columns `columns` exactly: kFloat32 where they
// are not whole blocks of it. Blocks of the file may be cut.
RowCodec CodecFor(const GgufTensor& tensor, const Range& columns);
// The smallest that holds what either holds, of the same columns.
RowCodec CommonCodec(RowCodec a, RowCodec b);

// Writes columns `columns` of the tensor's row, PackedRowBytes(codec, columns.size).
// `codec` must hold CodecFor(tensor, columns).
void PackRow(const GgufTensor& tensor, int64_t row, const Range& columns, RowCodec codec,
             std::byte* to);

}  // namespace heavywater
