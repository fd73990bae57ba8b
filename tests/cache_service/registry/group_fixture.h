// Groups of a registry, and calls that answer later.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cache_service/registry/group_registry.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"

namespace heavywater {

// The answer of one Join or Wait, once it has come.
template <typename T>
struct Pending {
  Ticket ticket = 0;
  int answers = 0;
  absl::StatusOr<T> result = absl::UnknownError("no answer yet");

  bool ok() const { return answers == 1 && result.ok(); }
  absl::StatusCode code() const { return result.status().code(); }
  std::string message() const { return std::string(result.status().message()); }
};
using PendingJoin = std::shared_ptr<Pending<v1::JoinResponse>>;
using PendingWait = std::shared_ptr<Pending<std::string>>;

class GroupRegistryTest : public ::testing::Test {
 protected:
  PendingJoin Join(const v1::JoinRequest& request) {
    auto pending = std::make_shared<Pending<v1::JoinResponse>>();
    pending->ticket = groups_.NewTicket();
    groups_.Join(pending->ticket, request, [pending](absl::StatusOr<v1::JoinResponse> result) {
      ++pending->answers;
      pending->result = std::move(result);
    });
    return pending;
  }
  PendingWait Wait(const std::string& key, Epoch epoch) {
    auto pending = std::make_shared<Pending<std::string>>();
    pending->ticket = groups_.NewTicket();
    v1::WaitRequest request;
    request.set_group("group");
    request.set_epoch(epoch);
    request.set_key(key);
    request.set_timeout_ms(1000);
    groups_.Wait(pending->ticket, request, [pending](absl::StatusOr<std::string> result) {
      ++pending->answers;
      pending->result = std::move(result);
    });
    return pending;
  }
  absl::Status Put(const std::string& key, const std::string& value, Epoch epoch) {
    v1::PutRequest request;
    request.set_group("group");
    request.set_epoch(epoch);
    request.set_key(key);
    request.set_value(value);
    return groups_.Put(request);
  }
  absl::Status Leave(int rank, Epoch epoch) {
    v1::LeaveRequest request;
    request.set_group("group");
    request.set_rank(rank);
    request.set_epoch(epoch);
    return groups_.Leave(request);
  }
  // All ranks join; the epoch.
  Epoch Form(int size) {
    std::vector<PendingJoin> joins;
    for (int rank = 0; rank < size; ++rank) joins.push_back(Join(TestJoin(rank, size)));
    for (const PendingJoin& join : joins) EXPECT_TRUE(join->ok()) << join->message();
    return joins[0]->result->epoch();
  }
  void Pass(absl::Duration duration) {
    clock_.Advance(duration);
    groups_.Tick();
  }

  FakeClock clock_;
  GroupRegistry groups_{RegistryOptions{.max_groups = 2}, clock_};
};

}  // namespace heavywater
