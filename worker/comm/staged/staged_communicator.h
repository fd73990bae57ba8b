// A communicator of host memory for device memory: copies to the host, lets the
// other sum, copies back. Slow; for ranks that share a GPU, which NCCL refuses.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "worker/backend/backend.h"
#include "worker/comm/communicator.h"

namespace heavywater {

// Results are there when calls return. `backend` copies and must outlive it.
class StagedCommunicator final : public Communicator {
 public:
  StagedCommunicator(std::unique_ptr<Communicator> host, Backend& backend)
      : host_(std::move(host)), backend_(backend) {}

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  std::string Name() const override { return host_->Name() + "-staged"; }

  absl::Status AllReduceSum(DeviceSpan<float> data, Stream& stream) override;
  absl::Status AllReduceSum(DeviceSpan<int64_t> data, Stream& stream) override;
  absl::Status AllGather(DeviceSpan<const float> in, DeviceSpan<float> out,
                         Stream& stream) override;
  absl::Status Settle(Stream& stream) override { return host_->Settle(stream); }
  absl::Status Broadcast(std::vector<std::byte>& data, int root, absl::Duration timeout) override {
    return host_->Broadcast(data, root, timeout);
  }
  absl::Status Barrier() override { return host_->Barrier(); }
  void Abort(absl::Status reason) override { host_->Abort(std::move(reason)); }

 private:
  template <typename T>
  absl::Status Reduce(DeviceSpan<T> data, Stream& stream);
  // An error of the device's, which the peers must hear of.
  absl::Status AbortUnlessOk(absl::Status status);

  const std::unique_ptr<Communicator> host_;
  Backend& backend_;
};

}  // namespace heavywater
