// One rank of a group of processes, over Gloo. For CPU backends: device memory
// is host memory to it, and calls are finished when they return.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/base/mutex.h"
#include "worker/comm/communicator.h"
#include "worker/comm/gloo/gloo_collectives.h"

namespace heavywater {

class GlooCommunicator final : public Communicator {
 public:
  GlooCommunicator(std::unique_ptr<GlooMesh> mesh, absl::Duration timeout);
  // Tells the others that this rank leaves and waits briefly for them to leave,
  // too, so that nobody's last message is cut off.
  ~GlooCommunicator() override;

  // The first exchange: returns when all ranks have come this far.
  absl::Status Connect();
  // The last one: what the destructor does unless it was done before. OK when all
  // ranks leave.
  absl::Status Leave();

  int rank() const override { return collectives_.mesh().rank(); }
  int size() const override { return collectives_.mesh().size(); }
  std::string Name() const override { return "gloo"; }

  absl::Status AllReduceSum(DeviceSpan<float> data, Stream& stream) override;
  absl::Status AllReduceSum(DeviceSpan<int64_t> data, Stream& stream) override;
  absl::Status AllGather(DeviceSpan<const float> in, DeviceSpan<float> out,
                         Stream& stream) override;
  absl::Status Broadcast(std::vector<std::byte>& data, int root, absl::Duration timeout) override;
  absl::Status Barrier() override;
  void Abort(absl::Status reason) override;

  // For a communicator that moves its data another way and agrees here.
  //
  // A call's header; each has the next number, agreed upon or not.
  CallHeader NextCall(CallOp op, CallType type, int64_t length);
  // Runs a collective unless an earlier one failed; keeps its error.
  absl::Status Run(const CallHeader& call, const std::function<absl::Status()>& collective);
  // Returns when all ranks have stated the same call.
  absl::Status Agree(const CallHeader& call);
  // Any thread.
  absl::Status FirstError() const;
  // Keeps the first of all errors, and returns it. Any thread.
  absl::Status Break(absl::Status status);
  GlooCollectives& collectives() { return collectives_; }
  absl::Duration timeout() const { return timeout_; }

 private:
  const absl::Duration timeout_;
  GlooCollectives collectives_;
  uint64_t sequence_ = 0;
  bool has_left_ = false;
  mutable Mutex mutex_;
  absl::Status broken_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace heavywater
