// Decode attention of a few queries over one block of slots. The block's result
// is relative to its own maximum; the caller merges blocks (decode_attention.cc).
#pragma once

#include <cstdint>

#include "cache_service/base/ids.h"
#include "worker/backend/cpu/target.h"
#include "worker/cache/kv_layout.h"

namespace heavywater {

// Slots per task. Fixed, so that how work is split over threads never changes a
// bit: the weights of 8 queries over a block are 16 KiB and stay in L1.
inline constexpr int kSlotBlock = 512;
// Queries that share one pass over K and V.
inline constexpr int kMaxQueryRows = 8;
// Query and output rows are padded to whole vectors of any target.
inline constexpr int kRowPadding = 16;

inline int64_t PaddedRow(int64_t head_dim) {
  return (head_dim + kRowPadding - 1) / kRowPadding * kRowPadding;
}

struct SlotBlock {
  KvDtype dtype = KvDtype::kFloat32;
  int head_dim = 0;
  const void* keys = nullptr;           // [count][head_dim] of dtype
  const void* values = nullptr;         // [count][head_dim] of dtype
  const Position* positions = nullptr;  // [count], kNoPosition = free
  int count = 0;                        // 1 .. kSlotBlock
  const void* next_keys = nullptr;      // where the next block's may begin, to be fetched; or null
};

struct QueryRows {
  const float* queries = nullptr;          // [num_rows][PaddedRow(head_dim)], scaled, zero padded
  int num_rows = 0;                        // 1 .. kMaxQueryRows
  Position positions[kMaxQueryRows] = {};  // row r sees slots with 0 <= position <= positions[r]
};

struct BlockResult {
  float* weights = nullptr;      // [num_rows][weights_stride] exp(logit - maximum), exactly 0
                                 // where masked and up to the next multiple of 16
  int64_t weights_stride = 0;    // a multiple of 16
  float* out = nullptr;          // [num_rows][PaddedRow(head_dim)] sum of weight * value
  float maximum[kMaxQueryRows];  // -infinity when a row sees no slot
  double sum[kMaxQueryRows];     // of the weights
};

struct DecodeKernels {
  void (*attend_block)(const SlotBlock& block, const QueryRows& rows, BlockResult& result);
  // sums[i] += factor * from[i]. `count` is a multiple of 8.
  void (*add_scaled)(const float* from, double factor, int64_t count, double* sums);
  // gains[i] += sum over rows of round(weights[r][i] * factors[r] * 2^32), each
  // rounded on its own, half to even. Products must lie in [0, 2^19).
  void (*add_gains)(const float* weights, int64_t weights_stride, const double* factors,
                    int num_rows, int64_t count, int64_t* gains);
};

const DecodeKernels& DecodeKernelsOf(CpuTarget target);

}  // namespace heavywater
