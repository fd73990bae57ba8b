// Attend() of the CPU backend: splits a batch into tasks of one KV head, up to
// kMaxQueryRows queries and one block of slots, and merges the blocks. Recall's
// part is recall_attention.h's.
#pragma once

#include <memory>
#include <vector>

#include "cache_service/base/mutex.h"
#include "worker/backend/backend.h"
#include "worker/backend/cpu/decode_kernels.h"
#include "worker/backend/cpu/thread_pool.h"

namespace heavywater {

class DecodeAttention {
 public:
  // Borrows the pool.
  DecodeAttention(CpuTarget target, ThreadPool& pool);
  ~DecodeAttention();

  void Attend(const KvShape& shape, const AttendParams& params);

 private:
  struct Scratch;
  struct Unit;

  static std::vector<Unit> MakeUnits(const KvShape& shape, const AttendParams& params);
  void AttendBlock(const KvShape& shape, const AttendParams& params, Unit& unit, int64_t block);
  static std::vector<double> BlockFactors(const std::vector<BlockResult>& blocks, int row);
  static std::vector<double> Merge(const KvShape& shape, const AttendParams& params, Unit& unit);
  void AddGains(const Unit& unit, const std::vector<double>& factors);
  void FinishUnit(const KvShape& shape, const AttendParams& params, Unit& unit);
  void Recall(const KvShape& shape, const AttendParams& params, Unit& leader);
  void StartBlock(const KvShape& shape, const AttendParams& params, Unit& unit);
  bool FinishBlock(Unit& unit);
  void Release(Unit& unit);

  const CpuTarget target_;
  const DecodeKernels& kernels_;
  ThreadPool& pool_;
  Mutex mutex_;
  std::vector<std::unique_ptr<Scratch>> free_ ABSL_GUARDED_BY(mutex_);
  Mutex gains_mutex_;
};

}  // namespace heavywater
