// GroupService's key-value store, where ranks find each other.
#pragma once

#include <memory>
#include <string>

#include "cache_service/base/ids.h"
#include "heavywater/v1/group.grpc.pb.h"
#include "worker/comm/rendezvous.h"

namespace heavywater {

// One group in one epoch. Thread safe.
class GroupRendezvous final : public RendezvousStore {
 public:
  GroupRendezvous(const std::shared_ptr<grpc::Channel>& channel, std::string group, Epoch epoch);
  absl::Status Put(const std::string& key, const std::string& value) override;
  absl::StatusOr<std::string> Wait(const std::string& key, absl::Duration timeout) override;

 private:
  const std::unique_ptr<v1::GroupService::Stub> stub_;
  const std::string group_;
  const Epoch epoch_;
};

}  // namespace heavywater
