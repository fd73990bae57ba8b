// Collectives between the ranks of a group. Every rank calls the same
// operations in the same order with the same lengths and types. That is
// checked: a rank that differs makes the call, or Settle(), FAILED_PRECONDITION
// naming both lengths (or types, or operations) on every rank, before the host
// uses any result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/backend/device_buffer.h"
#include "worker/comm/rendezvous.h"

namespace heavywater {

// Used by one thread per rank, except Abort(). A call that fails leaves its data
// as it was. After any error the communicator is broken: every later call
// returns that error at once, and the other ranks' calls fail, too.
//
// Calls on device memory are queued on `stream`, as a backend's operations are;
// communicators of host memory have finished them when they return. Results may
// be used by later work on the stream; before the host uses one it calls
// Settle(), within the group's time-out after the call.
//
// Destroying it tells the others that this rank leaves; ranks that end together
// wait for each other, for 2 s at most.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual std::string Name() const = 0;  // "local", "gloo", "nccl", ...

  // In place, element-wise sum; the result is the same on every rank, bit for
  // bit. Integers are exact (modulo 2^64). Floats are rounded in an order of the
  // implementation's: rank order in host memory, NCCL's own on GPUs. UNAVAILABLE
  // when a peer is gone, DEADLINE_EXCEEDED after the time-out.
  virtual absl::Status AllReduceSum(DeviceSpan<float> data, Stream& stream) = 0;
  virtual absl::Status AllReduceSum(DeviceSpan<int64_t> data, Stream& stream) = 0;

  // out = [size()][in.size()], rank order; CHECKs its length.
  virtual absl::Status AllGather(DeviceSpan<const float> in, DeviceSpan<float> out,
                                 Stream& stream) = 0;

  // Waits for the calls that this rank has queued on `stream`. OK: all ranks made
  // the same ones, and their results are whole. After an error the results of
  // calls since the last Settle() are undefined. Collective.
  virtual absl::Status Settle(Stream& stream) { return absl::OkStatus(); }

  // Host bytes from rank `root`; the others' `data` is resized to what came.
  // `timeout` bounds the wait for the root (a follower waits long for the next
  // step), the rest is under the group's; at most kMaxBroadcastBytes.
  virtual absl::Status Broadcast(std::vector<std::byte>& data, int root,
                                 absl::Duration timeout) = 0;

  virtual absl::Status Barrier() = 0;

  // Makes calls in flight and later ones return `reason`. Any thread.
  virtual void Abort(absl::Status reason) = 0;
};

inline constexpr int64_t kMaxBroadcastBytes = int64_t{64} << 20;

// Ranks as threads of one process: communicator i of the result is rank i's.
std::vector<std::unique_ptr<Communicator>> CreateLocalGroup(int size, absl::Duration timeout);

struct GlooOptions {
  int rank = 0;
  int size = 1;
  std::string listen_address = "127.0.0.1";    // host name or IP that peers reach; no port
  std::string interface = "";                  // or a network interface instead
  absl::Duration timeout = absl::Seconds(30);  // of every operation, connecting included
  std::string key_prefix = "";                 // separates groups and epochs in the store
};
// Connects all ranks through `store`, which is not used afterwards, and returns
// when all are there. For backends whose device memory is host memory. Ignores
// SIGPIPE in this process unless it is handled already.
absl::StatusOr<std::unique_ptr<Communicator>> CreateGlooCommunicator(const GlooOptions& options,
                                                                     RendezvousStore& store);

}  // namespace heavywater
