// AttendPrompt() of the CPU backend: packs one KV head at a time, then runs
// tiles of query rows over it. A tile's block of rows x keys is the largest
// intermediate: no matrix of queries x keys.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "worker/backend/backend.h"
#include "worker/backend/cpu/prompt_kernels.h"
#include "worker/backend/cpu/thread_pool.h"

namespace heavywater {

class CpuPromptAttention {
 public:
  // Borrows the pool.
  CpuPromptAttention(CpuTarget target, ThreadPool& pool);

  // What Attend() needs of params.scratch for `num_keys` keys.
  int64_t ScratchBytes(const KvShape& shape, int64_t num_keys) const;

  void Attend(const KvShape& shape, const PromptParams& params);

 private:
  struct ThreadScratch {
    float* queries = nullptr;  // [head_dim][kTileRows]
    float* weights = nullptr;  // [kTileRows][TileStride(keys)]
    float* out = nullptr;      // [kTileRows][padded head_dim]
    int64_t* gains = nullptr;  // [keys]
  };
  struct Scratch {
    float* keys = nullptr;  // packed, as PackedKv has them
    float* values = nullptr;
    std::vector<ThreadScratch> threads;
    int64_t bytes = 0;
  };

  Scratch CutScratch(const KvShape& shape, int64_t num_keys, std::byte* memory) const;
  void Pack(const KvShape& shape, const PromptParams& params, int kv_head, int64_t num_keys);
  void AttendTile(const KvShape& shape, const PromptParams& params, int kv_head, int64_t first_row,
                  const ThreadScratch& scratch);
  void AddGains(const PromptParams& params, int kv_head, int64_t num_keys);

  const PromptKernels& kernels_;
  ThreadPool& pool_;
  Scratch scratch_;  // of the call that runs
  PackedKv packed_;
};

}  // namespace heavywater
