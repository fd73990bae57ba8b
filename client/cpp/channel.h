// How the clients' connections behave, and what names their mutations.
#pragma once

#include <grpcpp/support/channel_arguments.h>

#include <random>
#include <string>

#include "absl/strings/str_cat.h"

namespace heavywater {

inline grpc::ChannelArguments ClientChannelArguments() {
  grpc::ChannelArguments arguments;
  // gRPC repeats a call by itself when a connection ends under it. Nothing is
  // repeated here but reads, by us.
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  // A server that has died is looked for again and again.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // A machine that vanishes closes no connection.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  return arguments;
}

// Tells a replay of one mutation from another mutation.
inline std::string NewRequestId() {
  std::random_device random;
  return absl::StrCat(absl::Hex(random(), absl::kZeroPad8), absl::Hex(random(), absl::kZeroPad8),
                      absl::Hex(random(), absl::kZeroPad8), absl::Hex(random(), absl::kZeroPad8));
}

}  // namespace heavywater
