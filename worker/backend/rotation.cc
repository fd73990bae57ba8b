// Rotation at attention, of backends whose device memory is host memory.
#include <algorithm>

#include "cache_service/base/check.h"
#include "worker/backend/host_memory.h"
#include "worker/cache/kv_element.h"

namespace heavywater {
namespace {

// `angles`: half cosines, then half sines. The halves do not overlap, so that the
// compiler makes vectors of them.
template <typename T>
void RotateRow(const T* __restrict from, const float* __restrict angles, int half,
               T* __restrict to) {
  for (int i = 0; i < half; ++i) {
    const float first = ToFloat(from[i]);
    const float second = ToFloat(from[half + i]);
    FromFloat(first * angles[i] - second * angles[half + i], to[i]);
    FromFloat(second * angles[i] + first * angles[half + i], to[half + i]);
  }
}

const float* AnglesOf(DeviceSpan<const float> angles, int32_t place, int head_dim) {
  HW_CHECK(place >= 0 && (int64_t{place} + 1) * head_dim <= angles.size());
  return angles.device_address() + int64_t{place} * head_dim;
}

}  // namespace

absl::Status HostMemoryBackend::RotateKeys(const KvShape& shape, const RotateKeysParams& params,
                                           Stream&) {
  const LayerView& layer = params.layer;
  HW_CHECK(static_cast<int64_t>(params.places.size()) == layer.num_sets * layer.used);
  WithKvElement(shape.dtype, [&]<typename T>(std::type_identity<T>) {
    for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      const int set = SetOfKvHead(layer, kv_head);
      for (int64_t slot = 0; slot < layer.used; ++slot) {
        const int64_t row = (kv_head * layer.capacity + slot) * shape.head_dim;
        const int32_t place = params.places[set * layer.used + slot];
        RotateRow(reinterpret_cast<const T*>(layer.keys.device_address()) + row,
                  AnglesOf(params.angles, place, shape.head_dim), shape.head_dim / 2,
                  reinterpret_cast<T*>(params.to.device_address()) + row);
      }
    }
  });
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::RotateQueries(const KvShape& shape,
                                              const RotateQueriesParams& params, Stream&) {
  const int64_t width = int64_t{shape.num_query_heads} * shape.head_dim;
  for (size_t row = 0; row < params.places.size(); ++row) {
    const float* from = params.from.device_address() + static_cast<int64_t>(row) * width;
    float* to = params.to.device_address() + static_cast<int64_t>(row) * width;
    if (params.places[row] == kNoPlace) {
      std::copy_n(from, width, to);
      continue;
    }
    const float* angles = AnglesOf(params.angles, params.places[row], shape.head_dim);
    for (int64_t i = 0; i < width; i += shape.head_dim) {
      RotateRow(from + i, angles, shape.head_dim / 2, to + i);
    }
  }
  return absl::OkStatus();
}

}  // namespace heavywater
