// Products of a weight matrix with a few vectors: the decode step, where the
// time goes into reading the weights once.
#pragma once

#include <cstdint>

namespace heavywater {

// out[t][r] = sum over c of weights[r][c] * x[t][c].
struct MatmulArgs {
  const float* weights = nullptr;  // [rows][cols]
  int64_t rows = 0;
  int64_t cols = 0;
  const float* x = nullptr;  // [tokens][cols]
  int64_t tokens = 0;
  float* out = nullptr;  // [tokens][out_stride], out_stride >= rows
  int64_t out_stride = 0;
};

// On the calling thread. A token's result is the same, bit for bit, whatever
// other tokens are in the batch: a sequence decodes alike alone and with others.
void SmallMatmul(const MatmulArgs& args);

}  // namespace heavywater
