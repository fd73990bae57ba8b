// How the ranks of a Gloo group find and reach each other.
#pragma once

#include <gloo/rendezvous/context.h>

#include <exception>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/comm/communicator.h"
#include "worker/comm/rendezvous.h"

namespace heavywater {

// A connected full mesh. FAILED_PRECONDITION naming both sizes when ranks
// expect groups of different sizes; DEADLINE_EXCEEDED naming what was missing;
// UNAVAILABLE when an address cannot be used or reached. Ignores SIGPIPE in this
// process unless it is handled already: Gloo writes to sockets that may be closed.
absl::StatusOr<std::shared_ptr<gloo::rendezvous::Context>> ConnectGloo(const GlooOptions& options,
                                                                       RendezvousStore& store);

// What an exception of Gloo's means: DEADLINE_EXCEEDED for its time-outs, else
// UNAVAILABLE.
absl::Status StatusFromGloo(absl::string_view doing, const std::exception& error);

}  // namespace heavywater
