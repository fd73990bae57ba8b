// The parts of a Llama layer that are no matrix products, as kernels. All pointers
// are device memory; T is the weights' type. Each queues one kernel on `stream`.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "worker/model/cuda/weight_type.h"

namespace heavywater::cuda {

// out[t] = row rows[t] of the embedding [rows][width] of T; zeros where rows[t] is -1.
cudaError_t EmbedRows(const void* embedding, WeightType type, const int32_t* rows, int64_t tokens,
                      int64_t width, float* out, cudaStream_t stream);

// out[t][i] = x[t][i] / sqrt(mean of x[t]^2 + epsilon) * weight[i], as T.
cudaError_t RmsNorm(const float* x, const float* weight, float epsilon, int64_t tokens,
                    int64_t width, WeightType type, void* out, cudaStream_t stream);

// out[i] = x[i], as T.
cudaError_t Convert(const float* x, int64_t size, WeightType type, void* out, cudaStream_t stream);

// x[t][i] += row[i]; x is [tokens][width].
cudaError_t AddRow(const float* row, int64_t tokens, int64_t width, float* x, cudaStream_t stream);

// Heads of Q and K within rows of QKV, each normed by itself (RmsNorm) in place.
struct NormHeadsParams {
  float* qkv = nullptr;           // [tokens][stride]: query heads, KV heads, the rest
  const float* q_norm = nullptr;  // [head_dim]
  const float* k_norm = nullptr;  // likewise
  float epsilon = 0;
  int64_t tokens = 0;
  int64_t stride = 0;
  int64_t q_heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
};
cudaError_t NormHeads(const NormHeadsParams& params, cudaStream_t stream);

// Rows of Q, K and V one after the other to where each belongs; Q and K turned by RoPE
// in halves (vector_ops.h).
struct RotateParams {
  const float* qkv = nullptr;      // [tokens][q_width + 2 * kv_width]
  const float* cosines = nullptr;  // [tokens][head_dim / 2]
  const float* sines = nullptr;    // likewise
  float* q = nullptr;              // [tokens][q_width]
  float* k = nullptr;              // [tokens][kv_width]
  float* v = nullptr;              // [tokens][kv_width]
  int64_t tokens = 0;
  int64_t q_width = 0;
  int64_t kv_width = 0;
  int64_t head_dim = 0;
};
cudaError_t RotateQkv(const RotateParams& params, cudaStream_t stream);

// out[t][i] = silu(gate) * up as T; row t of gate_up is [gate, up], each [width].
cudaError_t SiluMultiply(const float* gate_up, int64_t tokens, int64_t width, WeightType type,
                         void* out, cudaStream_t stream);

// sum[i] += x[i].
cudaError_t AddTo(const float* x, int64_t size, float* sum, cudaStream_t stream);

// to[t][begin + i] = from[t][i] for i below `width`.
struct PlaceParams {
  const float* from = nullptr;  // [tokens][from_stride]
  float* to = nullptr;          // [tokens][to_stride]
  int64_t tokens = 0;
  int64_t width = 0;
  int64_t from_stride = 0;
  int64_t to_stride = 0;
  int64_t begin = 0;
};
cudaError_t PlaceColumns(const PlaceParams& params, cudaStream_t stream);

}  // namespace heavywater::cuda
