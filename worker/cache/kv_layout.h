// Shapes and bytes of the KV cache: the one place where they are computed.
#pragma once

#include <cstdint>
#include <string_view>

#include "absl/status/statusor.h"
#include "cache_service/base/ids.h"
#include "worker/cache/kv_dtype.h"

namespace heavywater {

std::string_view KvDtypeName(KvDtype dtype);  // "fp32", "bf16", "fp16"
absl::StatusOr<KvDtype> ParseKvDtype(std::string_view name);

// No model comes near it; kernels keep a few rows of it on the stack.
inline constexpr int kMaxKvHeadDim = 512;

// One rank's share of a model. Query head q (local) reads KV head
// q / group_size() (local).
struct KvShape {
  int num_layers = 0;
  int num_query_heads = 0;  // of this rank
  int num_kv_heads = 0;     // of this rank
  int first_kv_head = 0;    // this rank's first, counted over the model
  int total_kv_heads = 0;   // of the model
  int total_query_heads = 0;
  int head_dim = 0;
  KvDtype dtype = KvDtype::kBFloat16;
  int page_tokens = 256;

  int group_size() const { return num_query_heads / num_kv_heads; }
  int row_bytes() const { return 2 * head_dim * ElementBytes(dtype); }  // K and V of a position

  absl::Status Validate() const;
  bool operator==(const KvShape&) const = default;
};

// Bytes on the device for one layer of one sequence with `capacity` slots:
// keys and values, positions (int32) and scores (int64) per set, gains (int64)
// per KV head.
struct LayerBytes {
  int64_t slots = 0;
  int64_t scores = 0;
  int64_t tables = 0;
  int64_t total() const { return slots + scores + tables; }
};
LayerBytes DeviceLayerBytes(const KvShape& shape, int num_sets, int64_t capacity);

// What a cache that keeps everything holds of this rank's heads for one sequence:
// all layers, whole pages, nothing but keys and values.
int64_t FullCacheBytes(const KvShape& shape, int64_t tokens);

}  // namespace heavywater
