#include "worker/comm/gloo/gloo_mesh.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/comm/gloo/gloo_connect.h"

namespace heavywater {
namespace {

// The mesh is its context's only user, so one number names its messages.
constexpr int kSlot = 0;

// A message whose first byte has come is expected whole within this part of the
// time-out, so that a call ends within one and a half.
constexpr int kStallDivisor = 2;

}  // namespace

GlooMesh::GlooMesh(std::shared_ptr<gloo::rendezvous::Context> context)
    : context_(std::move(context)), outgoing_(kMaxMessageBytes), peers_(context_->size) {}

absl::StatusOr<std::unique_ptr<GlooMesh>> GlooMesh::Connect(const GlooOptions& options,
                                                            RendezvousStore& store) {
  HW_ASSIGN_OR_RETURN(const GlooConnection connection, ConnectGloo(options, store));
  std::unique_ptr<GlooMesh> mesh(new GlooMesh(connection.context));
  for (int peer = 0; peer < mesh->size(); ++peer) {
    HW_RETURN_IF_ERROR(mesh->OpenPeer(peer, connection.pairs[peer], options.timeout));
  }
  return mesh;
}

absl::Status GlooMesh::OpenPeer(int peer, const PairAddresses& addresses, absl::Duration timeout) {
  if (peer == rank()) {
    sockets_.AddNone();
    return absl::OkStatus();
  }
  try {
    auto& pair = context_->getPair(peer);
    // First of all: from here on Gloo's thread leaves the socket alone. Were the
    // buffer known to it before, it could read a first message that the wait on
    // the socket would then never see.
    pair->setSync(/*sync=*/true, /*busyPoll=*/false);
    Peer& state = peers_[peer];
    state.incoming.resize(kMaxMessageBytes);
    state.out = pair->createSendBuffer(kSlot, outgoing_.data(), outgoing_.size());
    state.in = pair->createRecvBuffer(kSlot, state.incoming.data(), state.incoming.size());
    return sockets_.Add(addresses, timeout / kStallDivisor);
  } catch (const std::exception& error) {
    return StatusFromGloo(absl::StrCat("could not connect to rank ", peer), error);
  }
}

absl::Status GlooMesh::Send(int peer, int64_t bytes) {
  HW_CHECK(peer != rank() && bytes <= kMaxMessageBytes);
  try {
    peers_[peer].out->send(0, bytes);
    peers_[peer].out->waitSend();
    return absl::OkStatus();
  } catch (const std::exception& error) {
    return StatusFromGloo(absl::StrCat("could not send to rank ", peer), error);
  }
}

absl::StatusOr<int> GlooMesh::Receive(const std::vector<bool>& awaited, absl::Time deadline) {
  HW_ASSIGN_OR_RETURN(const int peer, sockets_.WaitReadable(awaited, deadline));
  try {
    peers_[peer].in->waitRecv();
    return peer;
  } catch (const std::exception& error) {
    return StatusFromGloo(absl::StrCat("could not receive from rank ", peer), error);
  }
}

}  // namespace heavywater
