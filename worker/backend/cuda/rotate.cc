#include "worker/backend/cuda/rotate.h"

#include <algorithm>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/backend/cuda/rotate_kernels.h"

namespace heavywater::cuda {
namespace {

// Places that go to the device at once.
constexpr int64_t kMostPlaces = int64_t{64} << 10;

void CheckPlaces(std::span<const int32_t> places, DeviceSpan<const float> angles, int head_dim) {
  for (const int32_t place : places) {
    HW_CHECK((int64_t{place} + 1) * head_dim <= angles.size());
  }
}

}  // namespace

absl::Status RotateKeys(CudaContext& context, const KvShape& shape, const RotateKeysParams& params,
                        cudaStream_t stream) {
  const LayerView& layer = params.layer;
  HW_CHECK(static_cast<int64_t>(params.places.size()) == layer.num_sets * layer.used);
  HW_CHECK(std::all_of(params.places.begin(), params.places.end(),
                       [](int32_t place) { return place >= 0; }));
  CheckPlaces(params.places, params.angles, shape.head_dim);
  const bool shared = layer.num_sets == 1;
  RotateKeysPass pass = {
      .keys = reinterpret_cast<const unsigned char*>(layer.keys.device_address()),
      .to = reinterpret_cast<unsigned char*>(params.to.device_address()),
      .places = nullptr,
      .angles = params.angles.device_address(),
      .capacity = layer.capacity,
      .first_slot = 0,
      .count = 0,
      .first_kv_head = 0,
      .heads = shared ? shape.num_kv_heads : 1,
      .head_dim = shape.head_dim};
  for (int set = 0; set < layer.num_sets; ++set) {
    pass.first_kv_head = set;
    for (pass.first_slot = 0; pass.first_slot < layer.used; pass.first_slot += pass.count) {
      pass.count = static_cast<int32_t>(std::min(layer.used - pass.first_slot, kMostPlaces));
      HW_ASSIGN_OR_RETURN(pass.places, context.Upload(params.places.subspan(
                                           set * layer.used + pass.first_slot, pass.count)));
      HW_RETURN_IF_CUDA_ERROR(LaunchRotateKeys(shape.dtype, pass, stream));
      HW_RETURN_IF_ERROR(context.RestartOperation(stream));
    }
  }
  return absl::OkStatus();
}

absl::Status RotateQueries(CudaContext& context, const KvShape& shape,
                           const RotateQueriesParams& params, cudaStream_t stream) {
  CheckPlaces(params.places, params.angles, shape.head_dim);
  const int64_t width = int64_t{shape.num_query_heads} * shape.head_dim;
  const auto rows = static_cast<int64_t>(params.places.size());
  for (int64_t first = 0; first < rows; first += kMostPlaces) {
    const int64_t count = std::min(rows - first, kMostPlaces);
    RotateQueriesPass pass = {.from = params.from.device_address() + first * width,
                              .to = params.to.device_address() + first * width,
                              .places = nullptr,
                              .angles = params.angles.device_address(),
                              .num_rows = count,
                              .num_query_heads = shape.num_query_heads,
                              .head_dim = shape.head_dim};
    HW_ASSIGN_OR_RETURN(pass.places, context.Upload(params.places.subspan(first, count)));
    HW_RETURN_IF_CUDA_ERROR(LaunchRotateQueries(pass, stream));
    HW_RETURN_IF_ERROR(context.RestartOperation(stream));
  }
  return absl::OkStatus();
}

}  // namespace heavywater::cuda
