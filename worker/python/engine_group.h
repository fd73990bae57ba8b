// The ranks of a tensor-parallel model, processes of their own: what their engines reduce with.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/comm/communicator.h"

namespace heavywater {

// A store that the caller has: torchrun's, as a rule. Called on the connecting thread.
struct CallerStore {
  std::function<absl::Status(const std::string& key, const std::string& value)> put;
  std::function<absl::StatusOr<std::string>(const std::string& key, absl::Duration timeout)> wait;
};

// One communicator for all engines of a LocalDevice in this process. Every rank drives its
// engines alike: their collectives meet in the order of the calls.
class EngineGroup {
 public:
  // Connects through `store` and returns when all ranks are there. INVALID_ARGUMENT naming the
  // field; DEADLINE_EXCEEDED, UNAVAILABLE as CreateGlooCommunicator().
  static absl::StatusOr<std::shared_ptr<EngineGroup>> Connect(const GlooOptions& options,
                                                              const CallerStore& store);

  Communicator& communicator() { return *communicator_; }
  int rank() const { return communicator_->rank(); }
  int size() const { return communicator_->size(); }

 private:
  explicit EngineGroup(std::unique_ptr<Communicator> communicator)
      : communicator_(std::move(communicator)) {}

  std::unique_ptr<Communicator> communicator_;
};

}  // namespace heavywater
