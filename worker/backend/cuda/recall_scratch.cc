#include "worker/backend/cuda/recall_scratch.h"

#include "worker/backend/recall.h"
#include "worker/cache/kv_layout.h"

namespace heavywater::cuda {
namespace {

constexpr int64_t kAlignment = 256;

struct Cut {
  RecallScratch scratch;
  int64_t bytes = 0;
};

// Without memory only counts.
Cut CutAll(const KvShape& shape, const RecallLimits& limits, int64_t num_tokens,
           std::byte* memory) {
  Cut cut;
  const auto take = [&]<typename T>(T*& array, int64_t count) {
    if (memory != nullptr) array = reinterpret_cast<T*>(memory + cut.bytes);
    cut.bytes += count * static_cast<int64_t>(sizeof(T));
    cut.bytes = (cut.bytes + kAlignment - 1) / kAlignment * kAlignment;
  };
  const int64_t parts = num_tokens * shape.num_kv_heads * kMaxScanParts;
  cut.scratch.stride = limits.max_picks;
  take(cut.scratch.candidates, parts * limits.max_picks);
  take(cut.scratch.num_candidates, parts);
  take(cut.scratch.masses, num_tokens * shape.num_query_heads * kMaxScanParts);
  return cut;
}

}  // namespace

int64_t RecallScratchBytes(const KvShape& shape, const RecallLimits& limits, int64_t num_tokens) {
  return limits.any() ? CutAll(shape, limits, num_tokens, nullptr).bytes : 0;
}

RecallScratch CutRecallScratch(const KvShape& shape, const RecallLimits& limits, int64_t num_tokens,
                               std::byte* memory) {
  return CutAll(shape, limits, num_tokens, memory).scratch;
}

}  // namespace heavywater::cuda
