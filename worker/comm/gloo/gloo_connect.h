// How the ranks of a Gloo group find and reach each other.
#pragma once

#include <gloo/rendezvous/context.h>
#include <sys/socket.h>

#include <exception>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/comm/communicator.h"
#include "worker/comm/rendezvous.h"

namespace heavywater {

// The two addresses that a pair's ranks listened on, one of which accepted the
// other's connection.
struct PairAddresses {
  sockaddr_storage mine{};
  sockaddr_storage theirs{};
};

struct GlooConnection {
  std::shared_ptr<gloo::rendezvous::Context> context;
  std::vector<PairAddresses> pairs;  // [rank], this rank's own is of no use
};

// A connected full mesh, within options.timeout and 10 s. FAILED_PRECONDITION naming both sizes
// when ranks expect groups of different sizes; DEADLINE_EXCEEDED naming what was missing;
// UNAVAILABLE when an address cannot be used or reached. Ignores SIGPIPE in this
// process unless it is handled already: Gloo writes to sockets that may be closed.
absl::StatusOr<GlooConnection> ConnectGloo(const GlooOptions& options, RendezvousStore& store);

// What an exception of Gloo's means: DEADLINE_EXCEEDED for its time-outs, else
// UNAVAILABLE.
absl::Status StatusFromGloo(absl::string_view doing, const std::exception& error);

}  // namespace heavywater
