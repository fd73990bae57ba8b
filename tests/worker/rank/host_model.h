// A model that computes in host memory, for ranks whose backend does not.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "worker/backend/backend.h"
#include "worker/rank/model.h"

namespace heavywater {

// Copies what `inner` reads from the device and back what it writes; done when a
// call returns. Both outlive it.
class HostModel final : public Model {
 public:
  HostModel(Model& inner, Backend& backend) : inner_(inner), backend_(backend) {}

  int hidden_size() const override { return inner_.hidden_size(); }
  int vocab_size() const override { return inner_.vocab_size(); }
  absl::Status Embed(std::span<const int32_t> tokens, DeviceSpan<float> hidden,
                     Stream& stream) override;
  absl::Status ComputeQkv(int layer, DeviceSpan<const float> hidden,
                          std::span<const Position> positions, DeviceSpan<float> q,
                          DeviceSpan<float> k, DeviceSpan<float> v, Stream& stream) override;
  absl::Status FinishLayer(int layer, DeviceSpan<const float> attention, DeviceSpan<float> hidden,
                           Stream& stream) override;
  absl::Status ComputeLogits(DeviceSpan<const float> hidden, DeviceSpan<float> logits,
                             Stream& stream) override;

 private:
  absl::StatusOr<std::vector<float>> Fetch(DeviceSpan<const float> from, Stream& stream);
  absl::Status Store(const std::vector<float>& from, DeviceSpan<float> to, Stream& stream);

  Model& inner_;
  Backend& backend_;
};

}  // namespace heavywater
