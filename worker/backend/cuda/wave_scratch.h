// How many tokens a wave has, and where its scratch memory lies.
#pragma once

#include <cstddef>
#include <cstdint>

#include "worker/backend/backend.h"
#include "worker/backend/cuda/attend_wave.h"

namespace heavywater::cuda {

// What a batch asks of a wave: the most of any of its tokens.
struct WaveNeeds {
  int64_t splits = 0;
  int64_t max_picks = 0;  // 0: no recall
};
WaveNeeds NeedsOf(int64_t capacity, const RecallLimits& recall);

// Enough for one token, and else for as many as fit 32 MiB, at most 128: by then the
// device is full. Never less for more of anything.
int64_t WaveScratchBytes(const KvShape& shape, const WaveNeeds& needs);

// Tokens of a wave in `bytes` of scratch, at least 1.
int64_t WaveTokens(const KvShape& shape, const WaveNeeds& needs, int64_t bytes);

struct CutWave {
  WaveScratch scratch;
  std::byte* end = nullptr;  // of what was cut
};
CutWave CutWaveScratch(const KvShape& shape, const WaveNeeds& needs, int64_t num_tokens,
                       std::byte* memory);

}  // namespace heavywater::cuda
