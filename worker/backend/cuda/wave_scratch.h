// How many tokens a wave has, and where its scratch memory lies. Plain C++.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "worker/backend/cuda/attend_wave.h"
#include "worker/backend/recall.h"
#include "worker/cache/kv_layout.h"

namespace heavywater::cuda {

// What a batch asks of a wave: the most of any of its tokens.
struct WaveNeeds {
  int64_t splits = 0;
  RecallLimits recall;

  // Of a token, in any mode.
  int64_t max_picks() const { return std::max(recall.max_picks, recall.all_positions); }
};
WaveNeeds NeedsOf(int64_t capacity, const RecallLimits& recall);

// Enough for one token, and else for as many as fit 32 MiB, at most 128: by then the
// device is full. Never less for more of anything.
int64_t WaveScratchBytes(const KvShape& shape, const WaveNeeds& needs);

// Tokens of a wave in `bytes` of scratch; 0 when not even one fits.
int64_t WaveTokens(const KvShape& shape, const WaveNeeds& needs, int64_t bytes);

// `memory` is 256-byte aligned.
WaveScratch CutWaveScratch(const KvShape& shape, const WaveNeeds& needs, int64_t num_tokens,
                           std::byte* memory);
// Behind it: RecallScratchBytes() of the wave.
std::byte* RecallMemoryOf(const KvShape& shape, const WaveNeeds& needs, int64_t num_tokens,
                          std::byte* memory);

// A prompt's chunk runs in pieces of up to so many tokens, whose totals are kept from
// the first sweep to the second.
inline constexpr int64_t kPromptTokens = 4096;
inline int64_t PromptTotals(int64_t num_keys) { return std::min(num_keys, kPromptTokens); }

}  // namespace heavywater::cuda
