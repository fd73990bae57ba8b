// The sketch of a page's keys: enough to estimate any query's logits for the
// page's positions without reading their K. The one place for its bytes.
//
// Of one KV head, the `channels` most telling channels (chosen once for each
// sequence, layer and head) are coded at 4 bits; of every other channel only
// the page's mean is kept:
//   k_c  ~  minimum_c + step_c * code_c    chosen channels, code 0 .. 15
//   k_c  ~  mean_c                         others
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace heavywater {

// Positions that a block of codes holds: a vector of 16 lanes.
inline constexpr int kSketchBlock = 16;
// Queries whose squares choose the channels.
inline constexpr int kSketchQueries = 32;

// Layout of one page of one KV head, in bytes:
//   codes    [page_tokens / 16][channels / 8][16 positions][4 bytes]: byte j of
//            position p holds the code of chosen channel 8 g + j in its low and
//            of 8 g + 4 + j in its high nibble
//   minima   [channels] fp16
//   steps    [channels] fp16
//   means    [head_dim - channels] fp16, the other channels in ascending order
struct SketchShape {
  int head_dim = 0;
  int channels = 0;       // a multiple of 8, at most head_dim
  int page_tokens = 256;  // a multiple of kSketchBlock

  int64_t code_bytes() const { return int64_t{page_tokens} * channels / 2; }
  int64_t minima_offset() const { return code_bytes(); }
  int64_t steps_offset() const { return minima_offset() + 2 * channels; }
  int64_t means_offset() const { return steps_offset() + 2 * channels; }
  // Rounded up, so that the next page's codes lie on a cache line.
  int64_t page_bytes() const {
    return (means_offset() + 2 * int64_t{head_dim - channels} + 63) / 64 * 64;
  }

  // INVALID_ARGUMENT naming the field, what came and what was wanted.
  absl::Status Validate() const;
  bool operator==(const SketchShape&) const = default;
};

// A quarter of the head, rounded up to whole groups of 8.
constexpr int QuarterSketchChannels(int head_dim) { return (head_dim + 31) / 32 * 8; }
// As many, and 24 for heads of 64 and more: 16 of 64 channels miss what 24 find
// (docs/decisions/2026-11-30-sketch-channels.md).
constexpr int DefaultSketchChannels(int head_dim) {
  const int quarter = QuarterSketchChannels(head_dim);
  return head_dim >= 64 && quarter < 24 ? 24 : quarter;
}

}  // namespace heavywater
