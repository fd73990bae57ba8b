// The scan of recall: estimated shares of attention of a page's positions, from
// its sketch (backend.h has the formula), for all query heads of a KV head in one
// pass over the codes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cache_service/base/ids.h"
#include "worker/backend/cpu/decode_kernels.h"
#include "worker/backend/cpu/target.h"
#include "worker/cache/sketch_shape.h"

namespace heavywater {

// One token's queries of one KV head, and where the scan puts what it works with.
struct ScanQuery {
  SketchShape sketch;
  int num_heads = 0;
  const float* chosen = nullptr;    // [num_heads][PaddedRow(channels)] scaled, of the chosen
                                    // channels in order, zero padded
  const float* others = nullptr;    // [num_heads][PaddedRow(head_dim - channels)] likewise
  const float* lse = nullptr;       // [num_heads] what estimated logits are relative to
  const std::byte* next = nullptr;  // the page that is scanned next: fetched; or null
  // Workspace.
  float* constants = nullptr;  // [num_heads]
  float* units = nullptr;      // [num_heads]
  float* offsets = nullptr;    // [num_heads]
  float* slopes = nullptr;     // [num_heads]
  int8_t* weights = nullptr;   // [num_heads][PaddedRow(channels)]
  int32_t* sums = nullptr;     // [num_heads][kSketchBlock]
};

struct PickCandidate {
  float value = 0;
  Position position = 0;
};

// `page` is the KV head's sketch of one page. Bit i of word w of `positions`
// ([page_tokens / 16]): position 16 w + i of the page counts.
struct ScanKernels {
  // Appends the positions whose value (mean over the heads of the estimated share)
  // is at least `least`, above 0, in ascending order, counted from `first`. Returns how many;
  // `to` has room for page_tokens.
  int64_t (*find_candidates)(const ScanQuery& query, const std::byte* page,
                             const uint16_t* positions, Position first, float least,
                             PickCandidate* to);
  // mass[head] += sum over the positions of their estimated shares.
  void (*add_mass)(const ScanQuery& query, const std::byte* page, const uint16_t* positions,
                   double* mass);
};

// `dot_products`: use the instructions for sums of byte products (VNNI) where the
// machine has them. Results are the same bits.
const ScanKernels& ScanKernelsOf(CpuTarget target, bool dot_products = true);

}  // namespace heavywater
