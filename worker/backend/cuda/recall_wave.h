// Recall within a wave of Attend() (attend_wave.h): what its kernels are given,
// what they leave, and their launches. All pointers are of device memory but the
// report's.
//
//   attend_splits, slot totals
//   LaunchRecallPicks:  scan, pick, attend_picks (one more split)
//   merge
//   LaunchMissingScan, LaunchRecallReport
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "worker/backend/cuda/attend_wave.h"
#include "worker/backend/cuda/recall_scratch.h"
#include "worker/cache/kv_layout.h"

namespace heavywater::cuda {

// Recall in one item of the wave. Copied by words.
struct alignas(8) RecallItem {
  const unsigned char* const* sketches;  // [num_pages] of [num_kv_heads][page_bytes]
  const unsigned char* const* host;      // [num_kv_heads][num_pages], null: no copy
  const uint8_t* channels;               // [num_kv_heads][num_channels]
  const uint16_t* demoted;               // [num_sets][num_pages * page_tokens / 16]
  int32_t num_pages;
  int32_t num_channels;
  int32_t page_bytes;  // of a KV head's sketch of a page
  int32_t max_picks;   // at most kMaxPicks, but in mode `all`
  float min_share;     // above 0
  int32_t all;
  int32_t report_picks;    // positions and gains are wanted
  int32_t report_missing;  // so is the missing share
  int32_t parts;           // ScanParts(num_pages)
  int32_t unused;
};

// Picks of a query and KV head that the kernels can sort, 40 KiB of shared memory.
inline constexpr int kMaxPicks = 8192;

// What the steps found, in host memory that the device writes: [tokens][num_kv_heads],
// and [count] each of picks and gains, the picks from number `first` on.
struct RecallReport {
  int32_t* num_picks;
  float* missing;
  int32_t* picks;
  int64_t* gains;
  int64_t first;
  int64_t count;
};

struct RecallWave {
  const RecallItem* items;  // those of the wave's tokens
  RecallScratch scratch;
  int32_t first_item;    // the batch's number of the first
  int32_t num_channels;  // the largest of the items, as are the next two
  int32_t parts;
  int32_t max_picks;  // of items that scan; 0: none does
  int32_t any_missing;
};

// Needs the totals of the slots alone. Leaves picks and num_picks (of tokens without
// recall: 0), and where there are picks sums and outs of split `splits` and
// pick_weights; where a token has recall and no picks that split's sum is 0.
cudaError_t LaunchRecallPicks(KvDtype dtype, const WaveShape& shape, const WaveToken* tokens,
                              const WaveScratch& scratch, const RecallWave& wave,
                              cudaStream_t stream);

// Needs the totals of slots and picks. Once, before the reports.
cudaError_t LaunchMissingScan(const WaveShape& shape, const WaveToken* tokens,
                              const WaveScratch& scratch, const RecallWave& wave,
                              cudaStream_t stream);
cudaError_t LaunchRecallReport(const WaveShape& shape, const WaveToken* tokens,
                               const WaveScratch& scratch, const RecallWave& wave,
                               const RecallReport& report, cudaStream_t stream);

// The parts of LaunchRecallPicks, each in its own file.
cudaError_t LaunchScan(const WaveShape& shape, const WaveToken* tokens, const WaveScratch& scratch,
                       const RecallWave& wave, cudaStream_t stream);
cudaError_t LaunchPick(const WaveShape& shape, const WaveToken* tokens, const WaveScratch& scratch,
                       const RecallWave& wave, cudaStream_t stream);
cudaError_t LaunchAttendPicks(KvDtype dtype, const WaveShape& shape, const WaveToken* tokens,
                              const WaveScratch& scratch, const RecallWave& wave,
                              cudaStream_t stream);

// Shared memory of a block of the scan, which bounds the shapes that it can do.
int64_t ScanSharedBytes(int group_size, int head_dim, int num_channels, int64_t max_picks);
inline constexpr int64_t kMaxScanSharedBytes = 160 * 1024;  // what sm_80 has, and more

}  // namespace heavywater::cuda
