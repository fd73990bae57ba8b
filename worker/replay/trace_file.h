// Traces: Q, K and V of one sequence, recorded, for policies to be judged without a
// model. Written by `heavywater-worker --record_dir` and by heavywater.trace (Python).
//
// The file, version 1, all numbers little endian:
//
//   8 bytes   "hwtrace" and a zero byte
//   uint32    version, 1
//   uint32    bytes of the header
//   uint32    CRC32C of the header
//   header    a JSON object: "num_layers", "num_query_heads", "num_kv_heads",
//             "head_dim", "num_tokens", "prompt_tokens", "dtype" ("fp32", "bf16" or
//             "fp16"), "attention_scale" (0: 1 / sqrt(head_dim)), "model" (any text)
//   for each layer:
//     Q       [num_tokens][num_query_heads][head_dim] of the dtype, rotated
//     K, V    [num_tokens][num_kv_heads][head_dim] likewise; K rotated
//     uint32  CRC32C over the CRC32Cs of the layer's blocks of 4096 bytes (the last one
//             is shorter), each as a uint32
//
// and nothing after it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/cache/kv_dtype.h"

namespace heavywater {

inline constexpr uint32_t kTraceVersion = 1;
inline constexpr int64_t kMaxTraceTokens = int64_t{1} << 20;
inline constexpr int64_t kMaxTraceBytes = int64_t{64} << 30;

struct TraceShape {
  int num_layers = 1;
  int num_query_heads = 1;
  int num_kv_heads = 1;
  int head_dim = 64;
  int64_t num_tokens = 1;
  int64_t prompt_tokens = 1;  // the others came one by one
  KvDtype dtype = KvDtype::kFloat32;
  double attention_scale = 0;
  std::string model = {};

  int64_t query_width() const { return int64_t{num_query_heads} * head_dim; }
  int64_t kv_width() const { return int64_t{num_kv_heads} * head_dim; }
  int64_t layer_bytes() const {
    return num_tokens * (query_width() + 2 * kv_width()) * ElementBytes(dtype);
  }
  // INVALID_ARGUMENT naming the field.
  absl::Status Validate() const;
};

// One layer in float: q [num_tokens][num_query_heads][head_dim], k and v
// [num_tokens][num_kv_heads][head_dim].
struct TraceLayer {
  std::vector<float> q;
  std::vector<float> k;
  std::vector<float> v;
};

struct Trace {
  TraceShape shape;
  std::vector<TraceLayer> layers;
};

// NOT_FOUND; DATA_LOSS: cut off, changed, or of another kind; INVALID_ARGUMENT naming
// the header's field, or the first number that is not finite.
absl::StatusOr<Trace> ReadTrace(const std::string& path);
// Under its name only once it is whole. INVALID_ARGUMENT; INTERNAL.
absl::Status WriteTrace(const std::string& path, const Trace& trace);

}  // namespace heavywater
