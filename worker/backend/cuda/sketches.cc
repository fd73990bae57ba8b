#include "worker/backend/cuda/sketches.h"

#include <algorithm>
#include <memory>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/backend/cuda/sketch_kernels.h"

namespace heavywater::cuda {
namespace {

absl::Status CheckSketch(const KvShape& shape, const SketchShape& sketch) {
  HW_RETURN_IF_ERROR(sketch.Validate());
  if (sketch.head_dim != shape.head_dim) {
    return absl::InvalidArgumentError(absl::StrCat("the sketch's head_dim is ", sketch.head_dim,
                                                   ", want the cache's, ", shape.head_dim));
  }
  return absl::OkStatus();
}

SketchGeometry GeometryOf(const KvShape& shape, const SketchShape& sketch) {
  return {.head_dim = sketch.head_dim,
          .channels = sketch.channels,
          .page_tokens = sketch.page_tokens,
          .dtype = shape.dtype,
          .minima_offset = static_cast<int32_t>(sketch.minima_offset()),
          .steps_offset = static_cast<int32_t>(sketch.steps_offset()),
          .means_offset = static_cast<int32_t>(sketch.means_offset()),
          .page_bytes = static_cast<int32_t>(sketch.page_bytes())};
}

// Positions of the page below num_positions, 0 where it has no copy.
int32_t CountOf(const SketchShape& sketch, const HostPageTable& host, int kv_head, int64_t page,
                int64_t num_positions) {
  if (host.Page(kv_head, page) == nullptr) return 0;
  const int64_t left = num_positions - page * sketch.page_tokens;
  return static_cast<int32_t>(std::clamp<int64_t>(left, 0, sketch.page_tokens));
}

const unsigned char* RowsOf(const HostPageTable& host, int kv_head, int64_t page) {
  return reinterpret_cast<const unsigned char*>(host.Page(kv_head, page));
}

// Device memory for the work enqueued on a stream until the end of its scope.
class Workspace {
 public:
  static absl::StatusOr<Workspace> Create(int64_t bytes, cudaStream_t stream) {
    void* memory = nullptr;
    HW_RETURN_IF_CUDA_ERROR(cudaMallocAsync(&memory, bytes, stream));
    return Workspace(static_cast<unsigned char*>(memory), stream);
  }
  unsigned char* memory() const { return memory_.get(); }

 private:
  struct Free {
    cudaStream_t stream;
    void operator()(unsigned char* memory) const { cudaFreeAsync(memory, stream); }
  };
  Workspace(unsigned char* memory, cudaStream_t stream) : memory_(memory, Free{stream}) {}

  std::unique_ptr<unsigned char, Free> memory_;
};

// Moments of every KV head's keys, whole pages at a time.
absl::Status AddAllMoments(const KvShape& shape, const ChooseChannelsParams& params,
                           const MomentsState& state, cudaStream_t stream) {
  const SketchShape& sketch = params.sketch;
  const int heads = shape.num_kv_heads;
  const int64_t num_pages = (params.num_positions + sketch.page_tokens - 1) / sketch.page_tokens;
  const int64_t pages_at_once = std::max(kMomentsWorks / heads, 1);
  MomentsWorks works = {.work = {}, .geometry = GeometryOf(shape, sketch)};
  int64_t page = 0;
  do {
    const bool first = page == 0;
    int num_works = 0;
    for (const int64_t end = std::min(page + pages_at_once, num_pages); page < end; ++page) {
      for (int kv_head = 0; kv_head < heads; ++kv_head) {
        works.work[num_works++] = {
            .rows = RowsOf(params.host, kv_head, page),
            .count = CountOf(sketch, params.host, kv_head, page, params.num_positions)};
      }
    }
    HW_RETURN_IF_CUDA_ERROR(LaunchAddMoments(works, num_works, heads, first, state, stream));
  } while (page < num_pages);
  return absl::OkStatus();
}

}  // namespace

absl::Status CudaSketches::ObserveQueries(const KvShape& shape, const ObserveQueriesParams& params,
                                          cudaStream_t stream) {
  const int64_t first = std::max<int64_t>(params.num_tokens - kSketchQueries, 0);
  const ObserveParams observe = {.queries = params.queries.device_address(),
                                 .squares = params.squares.device_address(),
                                 .first_token = first,
                                 .first_position = params.first_position,
                                 .num_query_heads = shape.num_query_heads,
                                 .group_size = shape.group_size(),
                                 .head_dim = shape.head_dim};
  return HW_CUDA_STATUS(LaunchObserve(observe, static_cast<int>(params.num_tokens - first),
                                      shape.num_kv_heads, stream));
}

absl::Status CudaSketches::ChooseChannels(const KvShape& shape, const ChooseChannelsParams& params,
                                          cudaStream_t stream) {
  HW_RETURN_IF_ERROR(CheckSketch(shape, params.sketch));
  if (shape.num_kv_heads > kMomentsWorks) {
    return absl::InvalidArgumentError(absl::StrCat("num_kv_heads is ", shape.num_kv_heads,
                                                   ", want at most ", kMomentsWorks,
                                                   " for recall on a GPU"));
  }
  HW_RETURN_IF_ERROR(context_.JoinCopies(stream));
  HW_ASSIGN_OR_RETURN(
      const Workspace workspace,
      Workspace::Create(MomentsStateBytes(shape.num_kv_heads, shape.head_dim), stream));
  const MomentsState state =
      CutMomentsState(workspace.memory(), shape.num_kv_heads, shape.head_dim);
  HW_RETURN_IF_ERROR(AddAllMoments(shape, params, state, stream));
  const ChooseParams choose = {.state = state,
                               .squares = params.squares.device_address(),
                               .channels = params.channels.device_address(),
                               .num_queries = static_cast<int32_t>(params.num_queries),
                               .head_dim = shape.head_dim,
                               .num_channels = params.sketch.channels};
  return HW_CUDA_STATUS(LaunchChoose(choose, shape.num_kv_heads, stream));
}

absl::Status CudaSketches::EncodePages(const KvShape& shape, const EncodePagesParams& params,
                                       cudaStream_t stream) {
  const SketchShape& sketch = params.sketch;
  HW_RETURN_IF_ERROR(CheckSketch(shape, sketch));
  HW_CHECK(params.end_page <= static_cast<int64_t>(params.pages.size()));
  HW_RETURN_IF_ERROR(context_.JoinCopies(stream));
  EncodeWorks works = {.work = {},
                       .channels = params.channels.device_address(),
                       .geometry = GeometryOf(shape, sketch)};
  int num_works = 0;
  const auto launch = [&] {
    const absl::Status status = HW_CUDA_STATUS(LaunchEncode(works, num_works, stream));
    num_works = 0;
    return status;
  };
  for (int64_t page = params.first_page; page < params.end_page; ++page) {
    HW_CHECK(params.pages[page].size() >= shape.num_kv_heads * sketch.page_bytes());
    auto* const to = reinterpret_cast<unsigned char*>(params.pages[page].device_address());
    for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      const int32_t count = CountOf(sketch, params.host, kv_head, page, params.num_positions);
      if (count == 0) continue;
      if (num_works == kEncodeWorks) HW_RETURN_IF_ERROR(launch());
      works.work[num_works++] = {.rows = RowsOf(params.host, kv_head, page),
                                 .sketch = to + kv_head * sketch.page_bytes(),
                                 .kv_head = kv_head,
                                 .count = count};
    }
  }
  return launch();
}

}  // namespace heavywater::cuda
