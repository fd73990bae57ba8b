// What a heartbeat's answer says of sequences that were opened again meanwhile.
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gtest/gtest.h"
#include "worker/server/cache_link.h"

namespace heavywater {
namespace {

// Says of every listed sequence that it is suspended; an answer waits while it is held.
class SuspendingService final : public v1::GroupService::Service {
 public:
  grpc::Status Join(grpc::ServerContext*, const v1::JoinRequest*,
                    v1::JoinResponse* response) override {
    response->set_epoch(1);
    response->set_heartbeat_interval_ms(5);
    return grpc::Status::OK;
  }
  grpc::Status Heartbeat(grpc::ServerContext*, const v1::HeartbeatRequest* request,
                         v1::HeartbeatResponse* response) override {
    *response->mutable_suspended_sequence_ids() = request->sequence_ids();
    MutexLock lock(&mutex_);
    waits_ = held_;
    while (held_) changed_.WaitWithTimeout(&mutex_, absl::Milliseconds(5));
    waits_ = false;
    return grpc::Status::OK;
  }
  void Hold(bool held) {
    MutexLock lock(&mutex_);
    held_ = held;
    changed_.SignalAll();
  }
  bool waits() {
    MutexLock lock(&mutex_);
    return waits_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  bool held_ ABSL_GUARDED_BY(mutex_) = false;
  bool waits_ ABSL_GUARDED_BY(mutex_) = false;
};

TEST(CacheLinkSuspendTest, AnAnswerOfTheTimeBeforeASequenceWasOpenedAgainEndsNothing) {
  SuspendingService service;
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  CacheLink link({.services = {{absl::StrCat("127.0.0.1:", port)}}, .group = "group"});
  Mutex mutex;
  std::vector<SequenceId> ended;
  link.SetSuspendListener([&](SequenceId sequence) {
    MutexLock lock(&mutex);
    ended.push_back(sequence);
  });
  const auto was_ended = [&](SequenceId sequence) {
    MutexLock lock(&mutex);
    return std::count(ended.begin(), ended.end(), sequence) > 0;
  };
  const auto wait_until = [](auto condition) {
    const absl::Time deadline = absl::Now() + absl::Seconds(10);
    while (!condition() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    return condition();
  };
  StopFlag stop;
  ASSERT_TRUE(link.Join(stop).ok());
  link.AddSequence(4);
  service.Hold(true);
  link.StartHeartbeats();
  ASSERT_TRUE(wait_until([&] { return service.waits(); }));
  // It has ended, and a further turn has opened it again, before the answer is here.
  link.RemoveSequence(4);
  link.AddSequence(4, absl::Now());
  link.AddSequence(5);
  {
    MutexLock lock(&mutex);
    EXPECT_TRUE(ended.empty());
  }
  service.Hold(false);
  // The next one knows.
  ASSERT_TRUE(wait_until([&] { return was_ended(5); }));
  MutexLock lock(&mutex);
  EXPECT_EQ(std::count(ended.begin(), ended.end(), 4), std::count(ended.begin(), ended.end(), 5));
}

}  // namespace
}  // namespace heavywater
