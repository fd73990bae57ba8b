// Messages between every two ranks of a group, over Gloo's TCP pairs in
// synchronous mode: the calling thread itself reads and writes the sockets, so
// no hand-over to Gloo's own thread stands between a message and its reader.
#pragma once

#include <gloo/rendezvous/context.h>
#include <gloo/transport/buffer.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"
#include "worker/comm/gloo/gloo_connect.h"
#include "worker/comm/gloo/peer_sockets.h"

namespace heavywater {

// Used by one thread, except Shutdown(). After an error only Shutdown() and the
// destructor may be called. Gloo's exceptions end here.
class GlooMesh {
 public:
  // The sockets of a pair hold two of these while nobody reads, so a rank may
  // send to each peer before it receives from any. Also one TCP segment of the
  // loopback device (65,483 bytes, Gloo's 48 included): a reader that has seen
  // the first byte never sleeps again for the rest.
  static constexpr int64_t kMaxMessageBytes = (int64_t{60} << 10) + 64;

  static absl::StatusOr<std::unique_ptr<GlooMesh>> Connect(const GlooOptions& options,
                                                           RendezvousStore& store);

  int rank() const { return context_->rank; }
  int size() const { return context_->size; }

  // Where the next message is written, [kMaxMessageBytes]; free again after Send().
  std::span<std::byte> outgoing() { return outgoing_; }
  // Sends the first `bytes` of outgoing().
  absl::Status Send(int peer, int64_t bytes);

  // Waits for one message from any peer in `awaited` ([size()]) and returns
  // whose. It then lies in incoming() until that peer is received from again.
  absl::StatusOr<int> Receive(const std::vector<bool>& awaited, absl::Time deadline);
  std::span<const std::byte> incoming(int peer) const { return peers_[peer].incoming; }

  // UNAVAILABLE when a peer has closed, even if what it sent before lies here.
  absl::Status CheckOpen() const { return sockets_.CheckOpen(); }

  // Closes all connections; a call in flight and the peers' calls fail. Any thread.
  void Shutdown() const { sockets_.Shutdown(); }

 private:
  struct Peer {
    std::vector<std::byte> incoming;
    // Destroyed before the context, whose pairs they belong to.
    std::unique_ptr<gloo::transport::Buffer> out;
    std::unique_ptr<gloo::transport::Buffer> in;
  };

  explicit GlooMesh(std::shared_ptr<gloo::rendezvous::Context> context);
  absl::Status OpenPeer(int peer, const PairAddresses& addresses, absl::Duration timeout);

  const std::shared_ptr<gloo::rendezvous::Context> context_;
  PeerSockets sockets_;
  std::vector<std::byte> outgoing_;
  std::vector<Peer> peers_;  // [size()], this rank's own is empty
};

}  // namespace heavywater
