#include "cache_service/server/durable_state.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <filesystem>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/server/cache_config.h"
#include "cache_service/tier/stale_slabs.h"

namespace heavywater {
namespace {

namespace fs = std::filesystem;

class DurableStateTest : public ::testing::Test {
 protected:
  DurableStateTest() {
    static int count = 0;
    name_ = absl::StrCat("heavywater-durable-test-", getpid(), "-", ++count);
    folder_ = ::testing::TempDir() + name_;
    config_ = DefaultCacheConfig();
    config_.set_state_dir(folder_);
    config_.set_slab_name(name_);
    config_.set_host_bytes(1 << 20);
  }
  ~DurableStateTest() override {
    fs::remove_all(folder_);
    RemoveStaleSlab(name_, /*unfinished_too=*/true);
    RemoveStaleSlab(config_.slab_name(), /*unfinished_too=*/true);
  }
  void SetUp() override {
    if (absl::IsInvalidArgument(OpenDurableState(config_).status())) {
      GTEST_SKIP() << "a build without RocksDB";
    }
  }
  // In the place of the slab, as a process that was killed had left it.
  void ReplaceSlab(int64_t bytes) {
    const std::string path = "/" + name_;
    shm_unlink(path.c_str());
    const int fd = shm_open(path.c_str(), O_CREAT | O_EXCL | O_RDWR, 0600);
    ASSERT_GE(fd, 0);
    EXPECT_EQ(ftruncate(fd, bytes), 0);
    close(fd);
  }
  static bool Exists(const std::string& slab) { return fs::exists("/dev/shm/" + slab); }

  std::string name_;
  std::string folder_;
  v1::CacheConfig config_;
};

TEST_F(DurableStateTest, ASlabThatHadAnotherNameGoesWithItsState) {
  ASSERT_TRUE(Exists(name_));
  config_.set_slab_name(name_ + "-new");
  const auto anew = OpenDurableState(config_);
  ASSERT_TRUE(anew.ok()) << anew.status();
  EXPECT_FALSE(anew->restores);
  EXPECT_FALSE(Exists(name_));
  EXPECT_TRUE(Exists(name_ + "-new"));
}

TEST_F(DurableStateTest, ASlabThatWaitsForItsServiceIsFoundWhileNobodyHasIt) {
  const auto waits = [this] {
    const std::vector<WaitingSlab> slabs = FindWaitingSlabs(name_);
    return slabs.size() == 1 && slabs[0].name == name_ && slabs[0].bytes > 0;
  };
  {
    const auto state = OpenDurableState(config_);
    ASSERT_TRUE(state.ok()) << state.status();
    EXPECT_FALSE(waits());
  }
  EXPECT_TRUE(waits());
  EXPECT_TRUE(OpenDurableState(config_)->restores) << "looking has changed nothing";
}

TEST_F(DurableStateTest, WhatLiesInTheSlabsPlaceDoesNotStopTheNextStart) {
  for (const int64_t bytes : {0, 5 * 4096, (1 << 20) + 4096}) {
    ReplaceSlab(bytes);
    const auto anew = OpenDurableState(config_);
    ASSERT_TRUE(anew.ok()) << bytes << ": " << anew.status();
    EXPECT_FALSE(anew->restores);
  }
  const auto again = OpenDurableState(config_);
  ASSERT_TRUE(again.ok()) << again.status();
  EXPECT_TRUE(again->restores);
}

TEST_F(DurableStateTest, ASecondServiceLeavesTheFirstOnesStateAlone) {
  const auto first = OpenDurableState(config_);
  ASSERT_TRUE(first.ok()) << first.status();
  config_.set_slab_name(name_ + "-new");
  EXPECT_EQ(OpenDurableState(config_).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Exists(name_));
  EXPECT_FALSE(Exists(name_ + "-new"));
}

}  // namespace
}  // namespace heavywater
