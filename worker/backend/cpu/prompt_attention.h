// AttendPrompt() of the CPU backend: packs one KV head at a time, then runs
// tiles of query rows over it. A tile's block of rows x keys is the largest
// intermediate: no matrix of queries x keys.
#pragma once

#include <vector>

#include "worker/backend/backend.h"
#include "worker/backend/cpu/aligned.h"
#include "worker/backend/cpu/prompt_kernels.h"
#include "worker/backend/cpu/thread_pool.h"

namespace heavywater {

class PromptAttention {
 public:
  // Borrows the pool.
  PromptAttention(CpuTarget target, ThreadPool& pool);

  void Attend(const KvShape& shape, const PromptParams& params);

 private:
  struct Scratch {  // of one thread
    AlignedScratch<float> queries;
    AlignedScratch<float> weights;
    AlignedScratch<float> out;
    std::vector<int64_t> gains;  // [keys]
  };

  void Pack(const KvShape& shape, const PromptParams& params, int kv_head, int64_t num_keys);
  void AttendTile(const KvShape& shape, const PromptParams& params, int kv_head, int64_t first_row,
                  Scratch& scratch);
  void AddGains(const PromptParams& params, int kv_head, int64_t num_keys);

  const PromptKernels& kernels_;
  ThreadPool& pool_;
  AlignedScratch<float> keys_;
  AlignedScratch<float> values_;
  PackedKv packed_;
  std::vector<Scratch> scratch_;  // [num_threads]
};

}  // namespace heavywater
