// The element-wise parts of a Llama layer, vectorised for whatever the machine
// has. Plain host memory; `out` may be the input itself.
#pragma once

#include <cstdint>

namespace heavywater {

// out[i] = x[i] / sqrt(mean(x^2) + epsilon) * weight[i].
void RmsNorm(const float* x, const float* weight, float epsilon, int64_t size, float* out);

// out[i] = silu(gate[i]) * up[i], silu(g) = g / (1 + exp(-g)).
void SiluMultiply(const float* gate, const float* up, int64_t size, float* out);

// sum[i] += x[i].
void AddTo(const float* x, int64_t size, float* sum);

// RoPE of one head in halves: the pair (x[i], x[i + half]) turns by the angle of
// which cosines[i] and sines[i] are given.
void RotateHalves(const float* x, const float* cosines, const float* sines, int64_t half,
                  float* out);

// log(sum of exp(x[i])), to single precision; size >= 1, no NaN, the largest finite.
double LogSumExp(const float* x, int64_t size);

}  // namespace heavywater
