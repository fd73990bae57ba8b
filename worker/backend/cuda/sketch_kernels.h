// Kernels that make sketches (recall.h): launches. Host pages are read in place,
// over the bus; what a launch works on travels in its parameters.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "worker/cache/kv_layout.h"

namespace heavywater::cuda {

// What the kernels need to know of a layer's pages.
struct SketchGeometry {
  int32_t head_dim;
  int32_t channels;
  int32_t page_tokens;
  KvDtype dtype;          // of the host's rows
  int32_t minima_offset;  // within a page's sketch, as are the next two
  int32_t steps_offset;
  int32_t means_offset;
  int32_t page_bytes;
};

// One KV head's page in host memory, and where its sketch goes. Parameters of a
// kernel are limited to 4 KiB.
struct EncodeWork {
  const unsigned char* rows;  // [count] of K and then V
  unsigned char* sketch;
  int32_t kv_head;
  int32_t count;  // at least 1
};
inline constexpr int kEncodeWorks = 160;
struct EncodeWorks {
  EncodeWork work[kEncodeWorks];
  const uint8_t* channels;  // [num_kv_heads][channels]
  SketchGeometry geometry;
};
cudaError_t LaunchEncode(const EncodeWorks& works, int num_works, cudaStream_t stream);

struct MomentsWork {
  const unsigned char* rows;
  int32_t count;  // 0: no copy, nothing to add
};
inline constexpr int kMomentsWorks = 240;
// Pages of a few positions: works are [num_pages][num_kv_heads].
struct MomentsWorks {
  MomentsWork work[kMomentsWorks];
  SketchGeometry geometry;
};

// Moments of every KV head's keys so far, and those of the pages of one launch.
struct MomentsState {
  double* mean;     // [num_kv_heads][head_dim]
  double* squares;  // [num_kv_heads][head_dim] of the deviations from the mean
  double* count;    // [num_kv_heads]
  float* of_pages;  // [kMomentsWorks][2][head_dim]: means, squares of deviations
};
int64_t MomentsStateBytes(int num_kv_heads, int head_dim);
MomentsState CutMomentsState(unsigned char* memory, int num_kv_heads, int head_dim);
// Adds the works' pages, in order. The first launch of a sequence begins anew.
cudaError_t LaunchAddMoments(const MomentsWorks& works, int num_works, int num_kv_heads, bool first,
                             const MomentsState& state, cudaStream_t stream);

struct ChooseParams {
  MomentsState state;
  const float* squares;  // [num_kv_heads][kSketchQueries][head_dim]
  uint8_t* channels;     // [num_kv_heads][channels]
  int32_t num_queries;
  int32_t head_dim;
  int32_t num_channels;
};
cudaError_t LaunchChoose(const ChooseParams& params, int num_kv_heads, cudaStream_t stream);

struct ObserveParams {
  const float* queries;  // [num_tokens][num_query_heads][head_dim]
  float* squares;        // [num_kv_heads][kSketchQueries][head_dim]
  int64_t first_token;   // tokens before it do not count any more
  int64_t first_position;
  int32_t num_query_heads;
  int32_t group_size;
  int32_t head_dim;
};
// Of tokens first_token .. first_token + num_tokens.
cudaError_t LaunchObserve(const ObserveParams& params, int num_tokens, int num_kv_heads,
                          cudaStream_t stream);

}  // namespace heavywater::cuda
