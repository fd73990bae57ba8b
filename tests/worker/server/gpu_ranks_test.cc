// Ranks and the GPUs of their node, over the shim of CUDA: the very gpu_cuda.cc and
// connect_ranks.cc of the worker, with doubles of cuBLAS and NCCL.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "tests/worker/backend/cuda_shim/cuda_shim.h"
#include "tests/worker/model/cuda/plain_matmul.h"
#include "tests/worker/model/tiny_llama.h"
#include "worker/cache/device_bytes.h"
#include "worker/server/connect_ranks.h"
#include "worker/server/gpu.h"

namespace heavywater {

// Of cuBLAS.
absl::StatusOr<std::unique_ptr<DeviceMatmul>> CreateCublasMatmul() { return CreatePlainMatmul(); }

// Of NCCL: that it was chosen is what there is to see.
absl::StatusOr<std::unique_ptr<Communicator>> ConnectGpus(const NcclOptions& options,
                                                          RendezvousStore&) {
  return absl::UnimplementedError("NCCL for device " + std::to_string(options.device));
}

namespace {

using ::testing::HasSubstr;

class GpuRanksTest : public testing::Test {
 protected:
  ~GpuRanksTest() override { cuda_shim::SetOptions({}); }
  static void Node(int devices) { cuda_shim::SetOptions({.num_devices = devices}); }

  // A worker of each entry's device, all of this node; where each one's ConnectRanks()
  // ended.
  static std::vector<absl::Status> Connect(const std::vector<int>& devices,
                                           const std::string& communicator, bool allow_shared,
                                           int timeout_ms = 30'000) {
    InProcessRendezvous store;
    std::vector<absl::Status> ended(devices.size());
    std::vector<std::thread> ranks;
    for (size_t rank = 0; rank < devices.size(); ++rank) {
      ranks.emplace_back([&, rank] {
        v1::WorkerConfig config;
        config.set_backend("cuda");
        config.set_communicator(communicator);
        config.set_allow_shared_device(allow_shared);
        config.set_rank(static_cast<int>(rank));
        config.set_size(static_cast<int>(devices.size()));
        config.set_device(devices[rank]);
        config.set_comm_address("127.0.0.1");
        config.set_comm_timeout_ms(timeout_ms);
        ended[rank] = ConnectAndSum(config, store);
      });
    }
    for (std::thread& rank : ranks) rank.join();
    return ended;
  }

 private:
  static absl::Status ConnectAndSum(const v1::WorkerConfig& config, RendezvousStore& store) {
    auto backend = CreateGpuBackend(config.device());
    if (!backend.ok()) return backend.status();
    auto communicator = ConnectRanks(config, "", &store, **backend);
    if (!communicator.ok()) return communicator.status();
    Stream stream = *(*backend)->NewStream();
    const DeviceBuffer buffer = *(*backend)->Allocate(sizeof(int64_t));
    int64_t value = 1 + config.rank();
    const auto bytes = std::as_writable_bytes(std::span(&value, 1));
    absl::Status status = (*backend)->CopyToDevice(buffer.As<std::byte>(), bytes, stream);
    status.Update((*communicator)->AllReduceSum(buffer.As<int64_t>(), stream));
    status.Update((*backend)->CopyToHost(bytes, buffer.As<std::byte>(), stream));
    status.Update((*backend)->Synchronize(stream));
    EXPECT_EQ(value, config.size() * (config.size() + 1) / 2);
    return status;
  }
};

TEST_F(GpuRanksTest, ADeviceThatIsNotThereIsNamedWithThoseThatAre) {
  Node(2);
  EXPECT_TRUE(CreateGpuBackend(1).ok());
  for (const int device : {-1, 2, 1023}) {
    const std::string name = "device is " + std::to_string(device);
    const absl::Status backend = CreateGpuBackend(device).status();
    EXPECT_TRUE(absl::IsInvalidArgument(backend));
    EXPECT_EQ(backend.message(), name + ", want 0 to 1: this process sees 2 GPUs");
    EXPECT_EQ(GpuIdentity(device).status(), backend);
  }
  Node(1);
  EXPECT_EQ(CreateGpuBackend(1).status().message(),
            "device is 1, want 0 to 0: this process sees 1 GPU");
}

TEST_F(GpuRanksTest, AMachineWithoutGpusSaysSo) {
  Node(0);
  for (const absl::Status& status : {CreateGpuBackend(0).status(), GpuIdentity(0).status()}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(status));
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("backend is \"cuda\" and this process sees no GPU"));
  }
}

TEST_F(GpuRanksTest, IdentitiesTellDevicesApart) {
  Node(2);
  EXPECT_EQ(*GpuIdentity(1), *GpuIdentity(1));
  EXPECT_NE(*GpuIdentity(0), *GpuIdentity(1));
  EXPECT_EQ(*GpuIdentity(0), "GPU-00000000000000000000000000000001");
}

TEST_F(GpuRanksTest, MoreRanksThanDevicesAreRefusedOnEveryRankNamingTheTwoThatShare) {
  Node(2);
  for (const std::string communicator : {"auto", "gloo", "nccl"}) {
    for (const absl::Status& status : Connect({0, 1, 1}, communicator, false)) {
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("ranks 1 and 2 use the same device"));
      EXPECT_THAT(std::string(status.message()), HasSubstr("allow_shared_device"));
    }
  }
}

// The third has no device at all: it says so, the others whom they miss.
TEST_F(GpuRanksTest, ARankWithoutADeviceOfItsOwnNamesIt) {
  Node(2);
  const std::vector<absl::Status> ended = Connect({0, 1, 2}, "auto", false, /*timeout_ms=*/500);
  EXPECT_THAT(std::string(ended[2].message()), HasSubstr("device is 2, want 0 to 1"));
  for (const int rank : {0, 1}) {
    EXPECT_TRUE(absl::IsDeadlineExceeded(ended[rank])) << ended[rank];
    EXPECT_THAT(std::string(ended[rank].message()), HasSubstr("device/2"));
  }
}

TEST_F(GpuRanksTest, RanksMayShareADeviceWhereThatIsAllowedAndReduceThroughTheHost) {
  Node(1);
  for (const std::string communicator : {"auto", "gloo"}) {
    for (const absl::Status& status : Connect({0, 0, 0}, communicator, true)) {
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST_F(GpuRanksTest, NcclJoinsRanksOfDifferentDevicesUnlessGlooIsAskedFor) {
  Node(2);
  for (const bool allow_shared : {false, true}) {
    const std::vector<absl::Status> ended = Connect({1, 0}, "auto", allow_shared);
    EXPECT_EQ(ended[0].message(), "NCCL for device 1");
    EXPECT_EQ(ended[1].message(), "NCCL for device 0");
    for (const absl::Status& status : Connect({1, 0}, "gloo", allow_shared)) {
      EXPECT_TRUE(status.ok()) << status;
    }
  }
}

TEST_F(GpuRanksTest, ARunnerOfAnUnknownWeightTypeIsRefusedByName) {
  Node(1);
  const std::string path = testing::TempDir() + "/gpu_ranks_test.gguf";
  std::ofstream(path, std::ios::binary) << TinyLlama(TinyLlamaShape(), 1).File();
  const auto file = GgufFile::Open(path);
  ASSERT_TRUE(file.ok()) << file.status();
  const auto alone = std::move(CreateLocalGroup(1, absl::Seconds(5)).front());
  const auto backend = CreateGpuBackend(0);
  const absl::Status status =
      CreateGpuRunner(**file, *alone, **backend, {.weights_dtype = "int3"}).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("weights_dtype is 'int3', want"));
  const auto runner = CreateGpuRunner(**file, *alone, **backend, {.weights_dtype = "fp32"});
  EXPECT_TRUE(runner.ok()) << runner.status();
}

}  // namespace
}  // namespace heavywater
