// The TCP sockets under Gloo's pairs, one per peer. Gloo blocks inside recv()
// with the pair locked, so nothing of its own interface can end a call early,
// bound one call's wait differently from another's, or notice that a peer other
// than the awaited one has died. The sockets can.
#pragma once

#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/gloo/gloo_connect.h"

namespace heavywater {

// Used by one thread, except Shutdown(). Holds duplicates: Gloo closes its own
// descriptors whenever it likes.
class PeerSockets {
 public:
  PeerSockets() = default;
  ~PeerSockets();
  PeerSockets(PeerSockets&& other) noexcept { fds_.swap(other.fds_); }
  PeerSockets& operator=(PeerSockets&& other) noexcept {
    fds_.swap(other.fds_);
    return *this;
  }

  // Finds a pair's connected socket among the process's descriptors and adds it
  // as the next peer's. Sets it to give up sends and receives after `timeout`, to
  // notice a silent machine, and to stay in this process. UNAVAILABLE when there is
  // no such socket: Gloo has closed it, because the peer has. INTERNAL when there are several.
  absl::Status Add(const PairAddresses& pair, absl::Duration timeout);
  // Takes the place of a peer without a connection: this rank itself.
  void AddNone() { fds_.push_back(-1); }

  // Waits until a peer in `awaited` has sent something or closed, and returns
  // which. A close by any other peer ends the wait, too, a little later:
  // UNAVAILABLE. DEADLINE_EXCEEDED at `deadline`.
  absl::StatusOr<int> WaitReadable(const std::vector<bool>& awaited, absl::Time deadline) const;

  // UNAVAILABLE when a peer has closed.
  absl::Status CheckOpen() const;

  // Ends both directions of all connections: blocked calls here and at the
  // peers return. Any thread.
  void Shutdown() const;

 private:
  std::vector<int> fds_;  // [peer], -1 for none
};

}  // namespace heavywater
