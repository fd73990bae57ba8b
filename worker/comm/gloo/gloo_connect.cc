#include "worker/comm/gloo/gloo_connect.h"

#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/device.h>
#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <csignal>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "worker/comm/gloo/gloo_store.h"
#include "worker/comm/gloo/listen_check.h"

namespace heavywater {
namespace {

// All ranks have just been seen when a group connects: one that does not come within
// this time has died since, which Gloo does not notice by itself.
constexpr absl::Duration kConnectTimeout = absl::Seconds(10);

// Gloo waits this many times its time-out for a connection.
constexpr int kGlooConnectTimeouts = 5;

absl::Status CheckOptions(const GlooOptions& options) {
  if (options.size >= 1 && options.rank >= 0 && options.rank < options.size &&
      options.timeout >= absl::Milliseconds(kGlooConnectTimeouts)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("got rank ", options.rank, " of ", options.size, " with timeout ",
                   absl::FormatDuration(options.timeout), ", want 0 <= rank < size and at least ",
                   kGlooConnectTimeouts, "ms"));
}

void IgnoreSigpipe() {
  struct sigaction action {};
  if (sigaction(SIGPIPE, nullptr, &action) == 0 && action.sa_handler == SIG_DFL) {
    signal(SIGPIPE, SIG_IGN);
  }
}

// Ranks of differently sized groups would connect to each other's wrong ports.
absl::Status CheckSizes(const GlooOptions& options, RendezvousStore& store, absl::Time deadline) {
  const auto key = [&](int rank) { return absl::StrCat(options.key_prefix, "/size/", rank); };
  const std::string mine = absl::StrCat(options.size);
  HW_RETURN_IF_ERROR(store.Put(key(options.rank), mine));
  for (int rank = 0; rank < options.size; ++rank) {
    const absl::Duration left = std::max(deadline - absl::Now(), absl::ZeroDuration());
    HW_ASSIGN_OR_RETURN(const std::string theirs, store.Wait(key(rank), left));
    if (theirs == mine) continue;
    return absl::FailedPreconditionError(absl::StrCat("rank ", options.rank, " expects a group of ",
                                                      mine, " ranks, rank ", rank, " one of ",
                                                      theirs));
  }
  return absl::OkStatus();
}

std::shared_ptr<gloo::transport::Device> CreateDevice(const GlooOptions& options) {
  gloo::transport::tcp::attr attr;
  attr.iface = options.interface;
  if (options.interface.empty()) attr.hostname = options.listen_address;
  return gloo::transport::tcp::CreateDevice(attr);
}

std::string AddressText(const sockaddr_storage& address) {
  char host[NI_MAXHOST] = "";
  char port[NI_MAXSERV] = "";
  const auto* generic = reinterpret_cast<const sockaddr*>(&address);
  getnameinfo(generic, sizeof(address), host, sizeof(host), port, sizeof(port),
              NI_NUMERICHOST | NI_NUMERICSERV);
  return absl::StrCat(host, ":", port);
}

// Where `rank` listened for `peer`: under its number a rank publishes one address
// per peer, in rank order. Throws as Gloo does when that is not so.
sockaddr_storage ListenAddress(GlooStore& store, int rank, int peer, int size) {
  const std::vector<char>& all = store.Seen(absl::StrCat(rank));
  const size_t bytes = all.size() / (size - 1);
  const auto begin = all.begin() + bytes * (peer < rank ? peer : peer - 1);
  return gloo::transport::tcp::Address(std::vector<char>(begin, begin + bytes)).getSockaddr();
}

// " (the others listen on: rank 1 at 10.0.0.7:4242)", as far as they have said so.
std::string PeersListenOn(const GlooOptions& options, GlooStore& store) try {
  std::string peers;
  for (int rank = 0; rank < options.size; ++rank) {
    if (rank == options.rank || store.Seen(absl::StrCat(rank)).empty()) continue;
    absl::StrAppend(&peers, peers.empty() ? " (the others listen on: " : ", ", "rank ", rank,
                    " at ", AddressText(ListenAddress(store, rank, options.rank, options.size)));
  }
  return peers.empty() ? "" : peers + ")";
} catch (const std::exception&) {
  return "";  // one has published something else than addresses: the first error says it
}

}  // namespace

absl::StatusOr<GlooConnection> ConnectGloo(const GlooOptions& options, RendezvousStore& store) {
  HW_RETURN_IF_ERROR(CheckOptions(options));
  GlooConnection connection{std::make_shared<gloo::rendezvous::Context>(options.rank, options.size),
                            std::vector<PairAddresses>(options.size)};
  if (options.size == 1) return connection;
  HW_RETURN_IF_ERROR(CheckListens(options.listen_address, options.interface));
  IgnoreSigpipe();
  const absl::Duration timeout = std::min(options.timeout, kConnectTimeout);
  const absl::Time deadline = absl::Now() + timeout;
  HW_RETURN_IF_ERROR(CheckSizes(options, store, deadline));
  GlooStore gloo_store(store, absl::StrCat(options.key_prefix, "/gloo/"), deadline);
  try {
    connection.context->setTimeout(absl::ToChronoMilliseconds(timeout) / kGlooConnectTimeouts);
    std::shared_ptr<gloo::transport::Device> device = CreateDevice(options);
    connection.context->connectFullMesh(gloo_store, device);
    for (int peer = 0; peer < options.size; ++peer) {
      if (peer == options.rank) continue;
      connection.pairs[peer] = {ListenAddress(gloo_store, options.rank, peer, options.size),
                                ListenAddress(gloo_store, peer, options.rank, options.size)};
    }
  } catch (const std::exception& error) {
    if (!gloo_store.status().ok()) return gloo_store.status();
    return StatusFromGloo(
        absl::StrCat("rank ", options.rank, " could not connect from ",
                     options.interface.empty() ? options.listen_address : options.interface,
                     PeersListenOn(options, gloo_store)),
        error);
  }
  return connection;
}

absl::Status StatusFromGloo(absl::string_view doing, const std::exception& error) {
  const std::string message = absl::StrCat(doing, ": ", error.what());
  if (absl::StrContains(error.what(), "timeout")) return absl::DeadlineExceededError(message);
  return absl::UnavailableError(message);
}

}  // namespace heavywater
