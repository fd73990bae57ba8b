// The collectives as messages over a mesh. Every call opens with one exchange
// in which each rank tells all others what it calls (CallHeader) and, in the
// same messages, the first of its data: small calls need nothing more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/comm/call_contract.h"
#include "worker/comm/gloo/gloo_mesh.h"

namespace heavywater {

// Used by one thread. The caller's data changes only when a call succeeds.
// CheckCalls() decides before any data is looked at. After an error the mesh is
// of no further use.
class GlooCollectives {
 public:
  // `timeout` is each call's, where it takes none of its own.
  GlooCollectives(std::unique_ptr<GlooMesh> mesh, absl::Duration timeout);

  GlooMesh& mesh() const { return *mesh_; }
  // What each rank stated in the last call, [rank].
  std::span<const CallHeader> calls() const { return calls_; }

  // For float and int64_t (gloo_allreduce.cc).
  template <typename T>
  absl::Status AllReduceSum(const CallHeader& call, std::span<T> data);
  absl::Status AllGather(const CallHeader& call, std::span<const float> in, std::span<float> out);
  absl::Status Broadcast(const CallHeader& call, std::vector<std::byte>& data,
                         absl::Duration timeout);
  // Exchanges headers only.
  absl::Status Meet(const CallHeader& call, absl::Duration timeout);

 private:
  using PayloadFor = std::function<std::span<const std::byte>(int peer)>;

  // The opening exchange: headers and payloads to and from all, then the check.
  absl::Status MeetWith(const CallHeader& call, const PayloadFor& payload, absl::Time deadline);
  absl::Status SendToAll(const PayloadFor& payload);
  absl::Status Send(int peer, std::span<const std::byte> payload);
  absl::Status ReceiveFromAll(absl::Time deadline);
  absl::StatusOr<int> ReceiveFromAny(const std::vector<bool>& awaited, absl::Time deadline);
  std::vector<bool> AllPeers() const;
  // The payload of the last message from `peer`.
  std::span<const std::byte> Payload(int peer, int64_t bytes) const;

  absl::Status SendRest(std::span<const std::byte> data);
  absl::Status ReceiveRest(int root, std::span<std::byte> data, absl::Time deadline);

  template <typename T>
  absl::Status ReduceDirectly(const CallHeader& call, std::span<T> data, absl::Time deadline);
  template <typename T>
  absl::Status ReduceInParts(const CallHeader& call, std::span<T> data, absl::Time deadline);
  template <typename T>
  void SumInRankOrder(std::span<const T> mine, std::span<T> total) const;
  std::span<std::byte> Staging(int64_t bytes);

  const std::unique_ptr<GlooMesh> mesh_;
  const absl::Duration timeout_;
  std::vector<CallHeader> calls_;  // [rank], of the call in flight
  std::vector<std::byte> staging_;
};

}  // namespace heavywater
