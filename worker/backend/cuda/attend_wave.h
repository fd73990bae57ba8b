// What the kernels of Attend() hand to each other. A batch runs in waves of a few
// tokens each, so that the scratch memory does not depend on the batch.
//
// Kernels of a wave, in order: attend_splits (each split of the slots on its own),
// with recall: scan and pick, attend_picks (one more split: the picks); then merge
// (out) and add_gains. A wave that fills the device without splits runs attend_whole and
// merge instead (whole_wave.h), with the same bits. Splits lie at fixed slots, partial results are
// merged in their order: a ragged batch equals each sequence alone, bit for bit.
#pragma once

#include <cstdint>

namespace heavywater::cuda {

// Long enough that what splits exchange stays a few per cent of K and V, short
// enough that one short sequence still spreads over the device.
inline constexpr int kSplitSlots = 512;

// One token of the wave, in device memory.
struct WaveToken {
  const void* keys;          // [num_kv_heads][capacity][head_dim]
  const void* values;        // likewise
  const int32_t* positions;  // [num_sets][capacity], -1 free
  int64_t* gains;            // [num_kv_heads][capacity]; null: not accumulated
  const float* queries;      // [num_query_heads][head_dim]
  float* out;                // likewise
  double pivotal;            // above 0: gains count the probabilities above it; 0: add them
  int64_t capacity;
  int32_t used;
  int32_t num_sets;
  int32_t position;  // its own: sees slots of positions up to it
  int32_t recall;    // index into the wave's recall items, -1: none
  int32_t item;      // of the batch
  int32_t token;     // within the item
};

// Partial results of one split of one query row: its largest logit (scaled; -inf:
// nothing seen) and the sum of exp(logit - maximum). The sum is exact to the weights
// that it sums, so that the probabilities of a query add up to one.
struct alignas(16) SplitSum {
  double sum;
  float maximum;
  float unused;
};

// Scratch of a wave. `splits` counts those of the longest token; the picks are
// split number `splits` (in the stats and outs only). Row r = token * num_query_heads + head.
struct WaveScratch {
  float* weights;    // [rows][splits * kSplitSlots] exp(logit - the split's maximum), 0: not seen
  SplitSum* sums;    // [rows][splits + 1]
  float* outs;       // [rows][splits + 1][head_dim], not normalised
  SplitSum* totals;  // [rows] of the slots alone, then (after merge) of slots and picks
  float* pick_weights;  // [rows][max_picks], likewise; null without recall
  int32_t* picks;       // [tokens][num_kv_heads][max_picks] positions, ascending
  int32_t* num_picks;   // [tokens][num_kv_heads]
  int32_t splits;
  int32_t max_picks;
};

struct WaveShape {
  int32_t num_tokens;
  int32_t num_query_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t page_tokens;
  float scale;
};

}  // namespace heavywater::cuda
