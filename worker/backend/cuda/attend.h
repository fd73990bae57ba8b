// Launchers of decode attention over the slots: attend_splits or attend_whole, and what
// merges the splits. All asynchronous on `stream`; everything pointed to is device memory.
#pragma once

#include <cuda_runtime.h>

#include "worker/backend/cuda/attend_wave.h"
#include "worker/cache/kv_dtype.h"

namespace heavywater::cuda {

// Each split of each token's slots on its own: weights, sums and outs.
cudaError_t LaunchAttendSplits(KvDtype dtype, const WaveShape& shape, const WaveToken* tokens,
                               const WaveScratch& scratch, cudaStream_t stream);

// The same and the gains, by a block for each token and KV head that keeps the weights in
// `shared_bytes`: WholeWaveSharedBytes(), not 0. Without scratch.weights.
cudaError_t LaunchAttendWhole(KvDtype dtype, const WaveShape& shape, const WaveToken* tokens,
                              const WaveScratch& scratch, int64_t shared_bytes,
                              cudaStream_t stream);

// totals[row] of the slots alone: what recall's estimates are relative to.
cudaError_t LaunchSlotTotals(const WaveShape& shape, const WaveToken* tokens,
                             const WaveScratch& scratch, cudaStream_t stream);

// Outputs and totals of the slots and, where a token has recall, the picks.
cudaError_t LaunchMerge(const WaveShape& shape, const WaveToken* tokens, const WaveScratch& scratch,
                        cudaStream_t stream);

// Probabilities of the slots into the gains of tokens that have any. After the merge, where
// the wave was split.
cudaError_t LaunchAddGains(const WaveShape& shape, const WaveToken* tokens,
                           const WaveScratch& scratch, cudaStream_t stream);

}  // namespace heavywater::cuda
