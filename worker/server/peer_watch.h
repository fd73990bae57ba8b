// Notices a rank that has stopped without dying: a dead one's connections close,
// which its peers' collectives see at once; a stopped one's stay open, and a
// collective cannot tell it from one that computes. So somebody asks it, on
// threads that compute nothing
// (docs/decisions/2026-11-29-stopped-ranks-do-not-answer.md).
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/server/stop_flag.h"

namespace heavywater {

class Channels;

// One peer, one thread, until the peer is silent or this is destroyed.
class PeerWatch {
 public:
  // Asks the peer: DEADLINE_EXCEEDED when no answer of any kind came within
  // `timeout`; any other error is an answer, too.
  using Ping = std::function<absl::Status(absl::Duration timeout)>;
  // Called at most once, on the watch's thread.
  using OnSilent = std::function<void(absl::Status reason)>;

  // `on_silent` when a peer that has answered once then gives no answer for about
  // `timeout`. One that never answers cannot be reached from here: the log says so, and it
  // is not judged.
  PeerWatch(std::string peer, absl::Duration timeout, Ping ping, OnSilent on_silent);
  ~PeerWatch();  // waits for the question in flight

 private:
  void Run();

  const std::string peer_;
  const absl::Duration timeout_;
  const Ping ping_;
  const OnSilent on_silent_;
  StopFlag stop_;
  std::thread thread_;
};

// Asks the health service at `address` (HOST:PORT), whatever it says; errors name it. `channels`
// (null: plaintext) must outlive it.
PeerWatch::Ping MakeHealthPing(const std::string& address, const Channels* channels = nullptr);

}  // namespace heavywater
