// A rank that joins while others are lost joins again.
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/server/test_cache_service.h"
#include "tests/worker/server/tiny_model.h"
#include "worker/server/connect_ranks.h"
#include "worker/server/worker.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

class WorkerJoinTest : public ::testing::Test {
 protected:
  v1::WorkerConfig Config(int rank, int size) {
    v1::WorkerConfig config = TinyConfig(model_, rank, size);
    config.set_cache_address(service_.address());
    return config;
  }

  // The first `failures` tries end with `failure`.
  CommunicatorFactory FailsAtFirst(absl::Status failure, int failures) {
    return [this, failure, failures](
               const v1::WorkerConfig& config, const std::string& prefix, RendezvousStore* store,
               Backend& backend) -> absl::StatusOr<std::unique_ptr<Communicator>> {
      if (++tries_ <= failures) return failure;
      return ConnectRanks(config, prefix, store, backend);
    };
  }

  absl::StatusOr<std::unique_ptr<Worker>> Create(const v1::WorkerConfig& config,
                                                 const CommunicatorFactory& connect) {
    facts_.push_back(*ReadModelFacts(config));
    return Worker::Create(config, facts_.back(), "127.0.0.1:1", connect, stop_);
  }

  TestCacheService service_;
  TinyModel model_;
  std::vector<ModelFacts> facts_;
  StopFlag stop_;
  int tries_ = 0;
};

TEST_F(WorkerJoinTest, ARankThatLosesAnotherWhileItConnectsJoinsAgainAndSoDoTheOthers) {
  const std::vector<v1::WorkerConfig> configs = {Config(0, 3), Config(1, 3), Config(2, 3)};
  std::vector<ModelFacts> facts;
  for (const v1::WorkerConfig& config : configs) facts.push_back(*ReadModelFacts(config));
  std::vector<absl::StatusOr<std::unique_ptr<Worker>>> workers(3);
  const auto create = [&](size_t rank, const CommunicatorFactory& connect) {
    workers[rank] = Worker::Create(configs[rank], facts[rank], "127.0.0.1:1", connect, stop_);
  };
  std::thread first([&] { create(0, ConnectRanks); });
  std::thread second([&] { create(2, ConnectRanks); });
  create(1, FailsAtFirst(absl::UnavailableError("rank 0 closed its connection"), 2));
  first.join();
  second.join();
  for (const auto& worker : workers) {
    ASSERT_TRUE(worker.ok()) << worker.status();
    EXPECT_TRUE((*worker)->formed());
  }
  EXPECT_EQ(tries_, 3);
  for (const auto& worker : workers) {
    EXPECT_EQ((*worker)->link()->epoch(), (*workers[0])->link()->epoch());
  }
  // Together: each waits a moment for the others to leave.
  std::vector<std::thread> leave;
  for (auto& worker : workers) leave.emplace_back([&] { worker->reset(); });
  for (std::thread& thread : leave) thread.join();
}

TEST_F(WorkerJoinTest, ItGivesUpAfterTheTimeThatGroupsGetToFormAgain) {
  v1::WorkerConfig config = Config(0, 1);
  config.set_reform_timeout_ms(600);
  const absl::Time start = absl::Now();
  const auto worker = Create(config, FailsAtFirst(absl::UnavailableError("gone"), 1'000'000));
  EXPECT_EQ(worker.status(), absl::UnavailableError("gone"));
  EXPECT_GE(absl::Now() - start, absl::Milliseconds(600));
  EXPECT_LT(absl::Now() - start, absl::Seconds(10));
  EXPECT_GE(tries_, 2);
  EXPECT_LE(tries_, 10) << "it does not pause between tries";
}

TEST_F(WorkerJoinTest, AGroupThatDoesNotFormAgainEndsAtOnce) {
  v1::WorkerConfig config = Config(0, 1);
  config.set_reform_timeout_ms(0);
  EXPECT_EQ(Create(config, FailsAtFirst(absl::UnavailableError("gone"), 1)).status(),
            absl::UnavailableError("gone"));
  EXPECT_EQ(tries_, 1);
}

TEST_F(WorkerJoinTest, RanksThatDisagreeEndAtOnce) {
  const absl::Status disagree = absl::FailedPreconditionError("sizes differ");
  EXPECT_EQ(Create(Config(0, 1), FailsAtFirst(disagree, 1)).status(), disagree);
  EXPECT_EQ(tries_, 1);
}

TEST_F(WorkerJoinTest, AnAddressOfAnotherMachineIsNamedBeforeAnybodyWaits) {
  v1::WorkerConfig config = Config(0, 3);  // the others never come
  config.set_comm_address("192.0.2.7");
  const absl::Status address = Create(config, ConnectRanks).status();
  EXPECT_EQ(address.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(address.message()), HasSubstr("192.0.2.7"));
  config.set_comm_interface("eth77");
  const absl::Status interface = Create(config, ConnectRanks).status();
  EXPECT_THAT(std::string(interface.message()), HasSubstr("interface eth77"));
}

}  // namespace
}  // namespace heavywater
