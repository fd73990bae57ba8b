#include "worker/server/worker_config.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

TEST(WorkerConfigTest, TheDefaultsWithAModelAreGood) {
  v1::WorkerConfig config = DefaultWorkerConfig();
  config.set_model("model.gguf");
  EXPECT_EQ(CheckWorkerConfig(config), absl::OkStatus());
  EXPECT_EQ(config.peer_timeout_ms(), 3000);
  EXPECT_EQ(config.comm_timeout_ms(), 30'000);
}

TEST(WorkerConfigTest, TimeOutsOutOfRangeAreRefusedByName) {
  v1::WorkerConfig config = DefaultWorkerConfig();
  config.set_model("model.gguf");
  config.set_peer_timeout_ms(299);
  absl::Status status = CheckWorkerConfig(config);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("peer_timeout_ms is 299, want 300 to "));
  config.set_peer_timeout_ms(3000);
  config.set_comm_timeout_ms(0);
  status = CheckWorkerConfig(config);
  EXPECT_THAT(std::string(status.message()), HasSubstr("comm_timeout_ms is 0, want 100 to "));
}

TEST(WorkerConfigTest, SeveralCacheServicesAreDifferentOnesAndAPasswordGoesToNoneInPlaintext) {
  v1::WorkerConfig config = DefaultWorkerConfig();
  config.set_model("model.gguf");
  EXPECT_TRUE(CacheAddressesOf(config).empty());
  config.set_cache_address("a:7700,b:7700");
  EXPECT_EQ(CheckWorkerConfig(config), absl::OkStatus());
  EXPECT_EQ(CacheAddressesOf(config), (std::vector<std::string>{"a:7700", "b:7700"}));
  for (const char* wrong : {"a:7700,", ",a:7700", "a:7700,b:7700,a:7700"}) {
    config.set_cache_address(wrong);
    const absl::Status status = CheckWorkerConfig(config);
    EXPECT_THAT(std::string(status.message()), HasSubstr(wrong));
  }
  config.set_cache_address("127.0.0.1:7700,b:7700");
  config.set_token_file("token");
  EXPECT_THAT(std::string(CheckWorkerConfig(config).message()),
              HasSubstr("would go to cache_address b:7700 in plaintext"));
  config.set_token_file("");
  config.set_cache_failover_ms(10);
  EXPECT_THAT(std::string(CheckWorkerConfig(config).message()),
              HasSubstr("cache_failover_ms is 10, want 1000 to "));
}

TEST(WorkerConfigTest, AGroupIsNotToldToReachARankEverywhere) {
  v1::WorkerConfig config = DefaultWorkerConfig();
  config.set_model("model.gguf");
  config.set_cache_address("127.0.0.1:7700");
  config.set_allow_plaintext(true);
  for (const char* any : {"0.0.0.0:7701", "[::]:7701", ":7701"}) {
    config.set_size(1);
    config.set_listen_address(any);
    config.set_advertised_address("");
    EXPECT_EQ(CheckWorkerConfig(config), absl::OkStatus()) << any;
    config.set_size(2);
    const absl::Status status = CheckWorkerConfig(config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << any;
    EXPECT_THAT(std::string(status.message()), HasSubstr("advertised_address is \"\""));
    EXPECT_THAT(std::string(status.message()), HasSubstr(any));
    config.set_advertised_address("10.0.0.7:7701");
    EXPECT_EQ(CheckWorkerConfig(config), absl::OkStatus()) << any;
    config.set_advertised_address("0.0.0.0:7701");
    EXPECT_EQ(CheckWorkerConfig(config).code(), absl::StatusCode::kInvalidArgument);
  }
}

TEST(WorkerConfigTest, CommunicatorsAreRefusedThatDoNotFitTheBackend) {
  v1::WorkerConfig config = DefaultWorkerConfig();
  config.set_model("model.gguf");
  config.set_communicator("mpi");
  EXPECT_THAT(std::string(CheckWorkerConfig(config).message()),
              HasSubstr("communicator is \"mpi\", want one of auto, gloo, nccl"));
  config.set_communicator("nccl");
  EXPECT_THAT(std::string(CheckWorkerConfig(config).message()),
              HasSubstr("communicator is \"nccl\" and backend is \"cpu\", want backend cuda"));
  config.set_backend("cuda");
  EXPECT_EQ(CheckWorkerConfig(config), absl::OkStatus());
  config.set_allow_shared_device(true);
  EXPECT_THAT(std::string(CheckWorkerConfig(config).message()), HasSubstr("allow_shared_device"));
  config.set_communicator("auto");
  EXPECT_EQ(CheckWorkerConfig(config), absl::OkStatus());
  config.set_device(-1);
  EXPECT_THAT(std::string(CheckWorkerConfig(config).message()), HasSubstr("device is -1, want 0"));
}

TEST(WorkerConfigTest, RanksMustAgreeOnTheCommunicator) {
  v1::WorkerConfig config = DefaultWorkerConfig();
  const std::string before = ConfigDigest(config);
  config.set_device(3);  // each rank its own
  EXPECT_EQ(ConfigDigest(config), before);
  config.set_communicator("gloo");
  EXPECT_NE(ConfigDigest(config), before);
  config.set_communicator("auto");
  config.set_allow_shared_device(true);
  EXPECT_NE(ConfigDigest(config), before);
}

}  // namespace
}  // namespace heavywater
