// Products of a weight matrix with a few vectors: the decode step, where the
// time goes into reading the weights once, in as few bits as they have.
#pragma once

#include <cstddef>
#include <cstdint>

#include "worker/model/packed_rows.h"

namespace heavywater {

// out[t][r] = sum over c of weights[r][c] * x[t][c].
struct MatmulArgs {
  const std::byte* weights = nullptr;  // [rows][PackedRowBytes(codec, cols)]
  RowCodec codec = RowCodec::kFloat32;
  int64_t rows = 0;
  int64_t cols = 0;
  const float* x = nullptr;  // [tokens][cols]
  int64_t tokens = 0;
  float* out = nullptr;  // [tokens][out_stride], out_stride >= rows
  int64_t out_stride = 0;
};

// On the calling thread. A token's result is the same, bit for bit, whatever
// other tokens are in the batch: a sequence decodes alike alone and with others;
// and the same for every codec that holds the weights.
void PackedMatmul(const MatmulArgs& args);

// The floats of `rows` packed rows, [rows][cols].
void UnpackRows(const std::byte* weights, RowCodec codec, int64_t rows, int64_t cols, float* out);

}  // namespace heavywater
