// heavywater-worker, but rank 1 contributes no scores to the reduces: what the
// end-to-end tests must notice. Everything else is the shipped worker.

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "worker/server/worker_main.h"

namespace heavywater {
namespace {

constexpr int kFaultyRank = 1;
// The ranks' agreement is shorter than this; with scores a buffer is longer.
constexpr int64_t kMaxAgreement = 64;

class ScoreLosingCommunicator final : public Communicator {
 public:
  explicit ScoreLosingCommunicator(std::unique_ptr<Communicator> inner)
      : inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  std::string Name() const override { return inner_->Name(); }

  absl::Status AllReduceSum(DeviceSpan<float> data, Stream& stream) override {
    return inner_->AllReduceSum(data, stream);
  }
  // The scores fill the buffer but for the ranks' agreement at its beginning.
  absl::Status AllReduceSum(DeviceSpan<int64_t> data, Stream& stream) override {
    if (rank() == kFaultyRank && data.size() > kMaxAgreement) {
      int64_t* values = data.device_address();
      for (int64_t i = data.size() / 2; i < data.size(); ++i) values[i] = 0;
    }
    return inner_->AllReduceSum(data, stream);
  }
  absl::Status AllGather(DeviceSpan<const float> in, DeviceSpan<float> out,
                         Stream& stream) override {
    return inner_->AllGather(in, out, stream);
  }
  absl::Status Settle(Stream& stream) override { return inner_->Settle(stream); }
  absl::Status Broadcast(std::vector<std::byte>& data, int root, absl::Duration timeout) override {
    return inner_->Broadcast(data, root, timeout);
  }
  absl::Status Barrier() override { return inner_->Barrier(); }
  void Abort(absl::Status reason) override { inner_->Abort(std::move(reason)); }

 private:
  std::unique_ptr<Communicator> inner_;
};

}  // namespace
}  // namespace heavywater

int main(int argc, char** argv) {
  using heavywater::Communicator;
  using heavywater::ScoreLosingCommunicator;
  return heavywater::WorkerMain(
      argc, argv,
      [](const auto& config, const std::string& key_prefix, auto* store,
         auto& backend) -> absl::StatusOr<std::unique_ptr<Communicator>> {
        auto inner = heavywater::ConnectRanks(config, key_prefix, store, backend);
        if (!inner.ok()) return inner.status();
        return std::make_unique<ScoreLosingCommunicator>(*std::move(inner));
      });
}
