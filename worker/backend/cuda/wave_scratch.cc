#include "worker/backend/cuda/wave_scratch.h"

#include <algorithm>

#include "worker/backend/cuda/recall_scratch.h"

namespace heavywater::cuda {
namespace {

constexpr int64_t kWaveBytes = int64_t{32} << 20;
constexpr int64_t kMaxWaveTokens = 128;
constexpr int64_t kAlignment = 256;

// Takes arrays from `memory` in turn; without it, only counts.
class Cutter {
 public:
  explicit Cutter(std::byte* memory) : memory_(memory) {}
  template <typename T>
  T* Take(int64_t count) {
    std::byte* const taken = memory_ == nullptr ? nullptr : memory_ + bytes_;
    bytes_ += count * static_cast<int64_t>(sizeof(T));
    bytes_ = (bytes_ + kAlignment - 1) / kAlignment * kAlignment;
    return reinterpret_cast<T*>(taken);
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* memory_;
  int64_t bytes_ = 0;
};

WaveScratch Cut(const KvShape& shape, const WaveNeeds& needs, int64_t num_tokens, Cutter& cutter) {
  const int64_t rows = num_tokens * shape.num_query_heads;
  const int64_t heads = num_tokens * shape.num_kv_heads;
  WaveScratch scratch = {};
  scratch.weights = cutter.Take<float>(rows * needs.splits * kSplitSlots);
  scratch.sums = cutter.Take<SplitSum>(rows * (needs.splits + 1));
  scratch.outs = cutter.Take<float>(rows * (needs.splits + 1) * shape.head_dim);
  scratch.totals = cutter.Take<SplitSum>(rows);
  if (needs.recall.any()) {
    scratch.pick_weights = cutter.Take<float>(rows * needs.max_picks());
    scratch.picks = cutter.Take<int32_t>(heads * needs.max_picks());
    scratch.num_picks = cutter.Take<int32_t>(heads);
  }
  scratch.splits = static_cast<int32_t>(needs.splits);
  scratch.max_picks = static_cast<int32_t>(needs.max_picks());
  return scratch;
}

// Without what recall's kernels need beside.
int64_t BytesOfWave(const KvShape& shape, const WaveNeeds& needs, int64_t num_tokens) {
  Cutter cutter(nullptr);
  Cut(shape, needs, num_tokens, cutter);
  return cutter.bytes();
}

int64_t BytesOfTokens(const KvShape& shape, const WaveNeeds& needs, int64_t num_tokens) {
  return BytesOfWave(shape, needs, num_tokens) +
         RecallScratchBytes(shape, needs.recall, num_tokens);
}

}  // namespace

WaveNeeds NeedsOf(int64_t capacity, const RecallLimits& recall) {
  return {.splits = (capacity + kSplitSlots - 1) / kSplitSlots, .recall = recall};
}

int64_t WaveScratchBytes(const KvShape& shape, const WaveNeeds& needs) {
  return std::min(BytesOfTokens(shape, needs, kMaxWaveTokens),
                  std::max(BytesOfTokens(shape, needs, 1), kWaveBytes));
}

int64_t WaveTokens(const KvShape& shape, const WaveNeeds& needs, int64_t bytes) {
  int64_t tokens = 0;
  while (tokens < kMaxWaveTokens && BytesOfTokens(shape, needs, tokens + 1) <= bytes) ++tokens;
  return tokens;
}

WaveScratch CutWaveScratch(const KvShape& shape, const WaveNeeds& needs, int64_t num_tokens,
                           std::byte* memory) {
  Cutter cutter(memory);
  return Cut(shape, needs, num_tokens, cutter);
}

std::byte* RecallMemoryOf(const KvShape& shape, const WaveNeeds& needs, int64_t num_tokens,
                          std::byte* memory) {
  return memory + BytesOfWave(shape, needs, num_tokens);
}

}  // namespace heavywater::cuda
