// Rows of tokens in one layer, on the device: what attention takes and returns.
#pragma once

#include <cstdint>

#include "worker/backend/device_buffer.h"
#include "worker/cache/kv_layout.h"

namespace heavywater {

// This rank's heads. Views: the caller keeps the memory alive.
struct AttentionRows {
  DeviceSpan<const float> queries;  // [rows][num_query_heads][head_dim], rotated
  DeviceSpan<const float> keys;     // [rows][num_kv_heads][head_dim], rotated
  DeviceSpan<const float> values;   // likewise
  DeviceSpan<float> out;            // like queries

  // `count` of them, from row `first` on.
  AttentionRows Sub(const KvShape& shape, int64_t first, int64_t count) const {
    const int64_t query_width = int64_t{shape.num_query_heads} * shape.head_dim;
    const int64_t kv_width = int64_t{shape.num_kv_heads} * shape.head_dim;
    return {.queries = queries.Sub(first * query_width, count * query_width),
            .keys = keys.Sub(first * kv_width, count * kv_width),
            .values = values.Sub(first * kv_width, count * kv_width),
            .out = out.Sub(first * query_width, count * query_width)};
  }
};

}  // namespace heavywater
