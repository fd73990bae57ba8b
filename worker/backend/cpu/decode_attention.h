// Attend() of the CPU backend: splits a batch into tasks of one KV head, up to
// kMaxQueryRows queries and one block of slots, and merges the blocks. Recall's
// part is recall_attention.h's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "cache_service/base/mutex.h"
#include "worker/backend/backend.h"
#include "worker/backend/cpu/decode_kernels.h"
#include "worker/backend/cpu/recall_attention.h"
#include "worker/backend/cpu/thread_pool.h"

namespace heavywater {

class DecodeAttention {
 public:
  // Borrows the pool.
  DecodeAttention(CpuTarget target, ThreadPool& pool);
  ~DecodeAttention();

  // What Attend() needs of params.scratch for up to `capacity` slots, and recall.
  int64_t ScratchBytes(const KvShape& shape, int64_t capacity, const RecallLimits& recall) const;

  void Attend(const KvShape& shape, const AttendParams& params);

 private:
  struct Scratch;
  struct Unit;
  struct Task;

  int64_t CutScratch(const KvShape& shape, int64_t num_blocks, const RecallLimits& recall,
                     std::byte* memory, std::vector<Scratch>& parts,
                     std::vector<RecallScratch>& recalls) const;
  static void MakeUnits(const KvShape& shape, const AttendParams& params, std::vector<Unit>& units);
  void PrepareScratch(const KvShape& shape, const AttendParams& params);
  static const std::byte* FirstKey(const KvShape& shape, const Task& task);
  // `next` null: none. Its first keys are fetched.
  void AttendBlock(const KvShape& shape, const AttendParams& params, const Task& task,
                   const Task* next);
  static void BlockFactors(std::span<const BlockResult> blocks, int row, double* factors);
  void Merge(const KvShape& shape, const AttendParams& params, Unit& unit,
             std::span<const BlockResult> blocks, std::vector<double>& factors);
  void AddGains(const Unit& unit, const std::vector<double>& factors);
  void FinishUnit(const KvShape& shape, const AttendParams& params, Unit& unit,
                  std::vector<double>& factors);
  void Recall(const KvShape& shape, const AttendParams& params, Unit& leader,
              RecallAttention& recall, std::vector<double>& factors);
  static void FetchWhatFollows(const KvShape& shape, const AttendParams& params, Unit& unit,
                               const Unit* next);
  void StartBlock(const KvShape& shape, const AttendParams& params, Unit& unit);
  bool FinishBlock(Unit& unit);
  void Release(Unit& unit);

  const DecodeKernels& kernels_;
  ThreadPool& pool_;
  // Of one call; members, so that a step allocates nothing: where the caches are cold, that
  // took several percent of a short context's time.
  std::vector<Unit> units_;
  std::vector<Task> tasks_;
  std::vector<RecallScratch> recall_scratch_;
  Mutex mutex_;
  std::vector<Scratch> free_ ABSL_GUARDED_BY(mutex_);
  Mutex gains_mutex_;
  std::vector<RecallAttention> recalls_;      // one per thread
  std::vector<std::vector<double>> factors_;  // one per thread
};

}  // namespace heavywater
