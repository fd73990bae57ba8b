// A model that passes everything on to another: what recorders override a part of.
#pragma once

#include <span>

#include "worker/rank/model.h"

namespace heavywater {

class ForwardingModel : public Model {
 public:
  // Borrows the model.
  explicit ForwardingModel(Model& model) : model_(model) {}

  int hidden_size() const override { return model_.hidden_size(); }
  int vocab_size() const override { return model_.vocab_size(); }
  absl::Status Embed(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                     Stream& stream) override {
    return model_.Embed(tokens, hidden, stream);
  }
  absl::Status ComputeQkv(int layer, DeviceSpan<const float> hidden,
                          std::span<const Position> positions, DeviceSpan<float> q,
                          DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) override {
    return model_.ComputeQkv(layer, hidden, positions, q, k, v, stream);
  }
  absl::Status FinishLayer(int layer, DeviceSpan<const float> attention, DeviceSpan<float> hidden,
                           Stream& stream) override {
    return model_.FinishLayer(layer, attention, hidden, stream);
  }
  absl::Status ComputeLogits(DeviceSpan<const float> hidden, DeviceSpan<float> logits,
                             Stream& stream) override {
    return model_.ComputeLogits(hidden, logits, stream);
  }

 private:
  Model& model_;
};

}  // namespace heavywater
