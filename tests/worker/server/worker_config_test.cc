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

}  // namespace
}  // namespace heavywater
