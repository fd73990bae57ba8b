#include "worker/server/peer_watch.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/runtime/logging.h"
#include "cache_service/security/channels.h"

namespace heavywater {
namespace {

constexpr absl::Duration kInterval = absl::Milliseconds(250);

// Questions in a row without an answer. More than one, because this process may
// itself have stood still during the last.
constexpr int kTries = 3;

constexpr char kHealthCheck[] = "/grpc.health.v1.Health/Check";

// The generic stub: gRPC's packages bring the health service, but no stub of it.
absl::Status CheckHealth(const std::shared_ptr<grpc::Channel>& channel, absl::Duration timeout) {
  grpc::GenericStub stub(channel);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  const grpc::Slice empty;
  const grpc::ByteBuffer request(&empty, 1);  // the whole server's health
  grpc::ByteBuffer response;
  grpc::Status status;
  grpc::CompletionQueue queue;
  const auto call = stub.PrepareUnaryCall(&context, kHealthCheck, request, &queue);
  call->StartCall();
  call->Finish(&response, &status, /*tag=*/nullptr);
  void* tag = nullptr;
  bool ok = false;
  queue.Next(&tag, &ok);
  queue.Shutdown();
  while (queue.Next(&tag, &ok)) {
  }
  return FromGrpcStatus(status);
}

}  // namespace

PeerWatch::PeerWatch(std::string peer, absl::Duration timeout, Ping ping, OnSilent on_silent)
    : peer_(std::move(peer)),
      timeout_(timeout),
      ping_(std::move(ping)),
      on_silent_(std::move(on_silent)),
      thread_([this] { Run(); }) {}

PeerWatch::~PeerWatch() {
  stop_.Stop();
  thread_.join();
}

void PeerWatch::Run() {
  bool has_answered = false;
  int in_vain = 0;
  int unanswered = 0;
  absl::Duration delay = absl::ZeroDuration();
  while (!stop_.WaitFor(delay)) {
    const absl::Status status = ping_(timeout_ / kTries);
    has_answered |= status.ok();
    if (!has_answered && ++in_vain == kTries) {
      LogWarn("a rank cannot be asked whether it lives; is its advertised_address right?",
              {{"peer", peer_}, {"error", status.ToString()}});
    }
    unanswered = absl::IsDeadlineExceeded(status) ? unanswered + 1 : 0;
    delay = unanswered > 0 ? absl::ZeroDuration() : kInterval;
    if (!has_answered || unanswered < kTries) continue;
    const absl::Status reason = absl::DeadlineExceededError(
        absl::StrCat(peer_, " has not answered for ", absl::FormatDuration(timeout_),
                     ": its process stands still or its machine is gone"));
    LogError("a rank is silent", {{"error", reason.ToString()}});
    on_silent_(reason);
    return;
  }
}

PeerWatch::Ping MakeHealthPing(const std::string& address, const Channels* channels) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // Several workers of one process (tests) must not share a connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const std::shared_ptr<grpc::Channel> channel =
      channels != nullptr
          ? channels->MakeWithoutToken(address, arguments)
          : grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
  return [channel, address](absl::Duration timeout) {
    const absl::Status status = CheckHealth(channel, timeout);
    if (status.ok()) return status;
    return absl::Status(status.code(), absl::StrCat(address, ": ", status.message()));
  };
}

}  // namespace heavywater
