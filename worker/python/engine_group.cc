#include "worker/python/engine_group.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/comm/rendezvous.h"

namespace heavywater {
namespace {

constexpr int kMaxRanks = 1024;

class StoreOfCaller final : public RendezvousStore {
 public:
  explicit StoreOfCaller(const CallerStore& store) : store_(store) {}
  absl::Status Put(const std::string& key, const std::string& value) override {
    return store_.put(key, value);
  }
  absl::StatusOr<std::string> Wait(const std::string& key, absl::Duration timeout) override {
    return store_.wait(key, timeout);
  }

 private:
  const CallerStore& store_;
};

}  // namespace

absl::StatusOr<std::shared_ptr<EngineGroup>> EngineGroup::Connect(const GlooOptions& options,
                                                                  const CallerStore& store) {
  if (options.size < 1 || options.size > kMaxRanks) {
    return absl::InvalidArgumentError(
        absl::StrCat("size is ", options.size, ", want 1 to ", kMaxRanks));
  }
  if (options.rank < 0 || options.rank >= options.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("rank is ", options.rank, ", want 0 to ", options.size - 1));
  }
  if (options.timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError("timeout_s is not above 0");
  }
  StoreOfCaller rendezvous(store);
  HW_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> communicator,
                      CreateGlooCommunicator(options, rendezvous));
  return std::shared_ptr<EngineGroup>(new EngineGroup(std::move(communicator)));
}

}  // namespace heavywater
