// What a step needs from whoever computes Q, K and V: the Llama runner, or an
// engine that brings its own. Calls are collective where the model is tensor
// parallel: every rank makes the same ones in the same order.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "cache_service/base/ids.h"
#include "worker/backend/device_buffer.h"

namespace heavywater {

// Holds no state of any sequence: rows in, rows out.
class Model {
 public:
  virtual ~Model() = default;

  virtual int hidden_size() const = 0;
  virtual int vocab_size() const = 0;

  // hidden[i] = embedding of tokens[i]; [num_tokens][hidden_size].
  virtual absl::Status Embed(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                             Stream& stream) = 0;

  // This rank's heads: q [n][num_query_heads][head_dim], k and v
  // [n][num_kv_heads][head_dim]; q and k rotated at `positions` (n).
  virtual absl::Status ComputeQkv(int layer, DeviceSpan<const float> hidden,
                                  std::span<const Position> positions, DeviceSpan<float> q,
                                  DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) = 0;

  // Output projection, feed-forward and both all-reduces of the layer; updates
  // hidden [n][hidden_size] in place. attention is [n][num_query_heads][head_dim].
  virtual absl::Status FinishLayer(int layer, DeviceSpan<const float> attention,
                                   DeviceSpan<float> hidden, Stream& stream) = 0;

  // logits [n][vocab_size], whole on every rank.
  virtual absl::Status ComputeLogits(DeviceSpan<const float> hidden, DeviceSpan<float> logits,
                                     Stream& stream) = 0;
};

}  // namespace heavywater
