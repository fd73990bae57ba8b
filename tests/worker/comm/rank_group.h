// Runs one function on every rank of a group, each on its own thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "worker/backend/backend.h"
#include "worker/comm/communicator.h"

namespace heavywater {

// kNccl: the shipped communicator over fake_nccl.h. kStaged: Gloo through a backend.
enum class CommKind { kLocal, kGloo, kNccl, kStaged };

// What a conformance test runs on.
struct GroupParam {
  CommKind kind = CommKind::kLocal;
  int size = 1;
};
std::string GroupParamName(const GroupParam& param);  // "Gloo3"
std::string KindName(CommKind kind);                  // as Communicator::Name()

class RankGroup {
 public:
  // Rank i of a Gloo group listens on addresses[i], or 127.0.0.1. Fails the
  // process when the group cannot be formed.
  explicit RankGroup(const GroupParam& param, absl::Duration timeout = absl::Seconds(30),
                     const std::vector<std::string>& addresses = {});
  ~RankGroup();

  // Calls `body` once per rank, at once, and returns what each returned.
  using Body = std::function<absl::Status(int rank, Communicator& comm)>;
  std::vector<absl::Status> Run(const Body& body);

  Communicator& rank(int rank) { return *ranks_[rank]; }
  // Destroys a rank's communicator, as a rank does that leaves.
  void Destroy(int rank) { ranks_[rank].reset(); }

 private:
  std::vector<std::unique_ptr<Backend>> backends_;  // of kStaged
  std::vector<std::unique_ptr<Communicator>> ranks_;
};

// Runs `body` for 0..count-1, each on its own thread, and waits for all.
void RunOnThreads(int count, const std::function<void(int index)>& body);

}  // namespace heavywater
