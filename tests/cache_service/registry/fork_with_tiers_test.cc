// One sequence becomes two where there is a tier below host memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "cache_service/base/shortage.h"
#include "cache_service/registry/layout.h"
#include "tests/cache_service/registry/tiers_fixture.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

class ForkWithTiersTest : public TiersFixture {
 protected:
  absl::StatusOr<v1::ForkSequenceResponse> Fork(SequenceId id) {
    v1::ForkSequenceRequest request;
    request.set_sequence_id(id);
    request.set_request_id(absl::StrCat("fork-", ++num_forks_));
    return registry_->sequences().Fork(request);
  }
  // Pages that some rank writes, until `free` are left.
  void FillHost(int64_t free) {
    constexpr SequenceId kOther = 1000;
    ASSERT_TRUE(store_
                    ->Open({.sequence = kOther,
                            .geometry = {.num_layers = 1,
                                         .num_kv_heads = 1,
                                         .page_tokens = 16,
                                         .row_bytes = 256},
                            .max_tokens = 1000})
                    .ok());
    const int64_t pages = store_->Stats().free_bytes / kUnit - free;
    ASSERT_TRUE(
        store_->Reserve({.sequence = kOther, .heads = {0, 1}, .num_pages = pages}, true).ok());
  }
  int num_forks_ = 0;
};

TEST_F(ForkWithTiersTest, WithoutRoomItIsExhaustedEachTimeAndItsPagesStay) {
  const SequenceId parent = OpenAndFinish(50);
  FillHost(2);  // it wants four for the page in which the tokens end, and its watermarks
  for (int i = 0; i < 3; ++i) {
    const absl::Status refused = Fork(parent).status();
    ASSERT_EQ(refused.code(), absl::StatusCode::kResourceExhausted) << refused;
    const std::optional<Shortage> shortage = ShortageOf(refused);
    ASSERT_TRUE(shortage.has_value()) << refused;
    EXPECT_EQ(shortage->subject, "host_bytes");
    EXPECT_EQ(store_->HostBytes(parent), 16 * kUnit) << "moved down in vain";
  }
  ASSERT_TRUE(store_->Release(1000).ok());
  store_->StopWriter(1000, 0);
  const auto forked = Fork(parent);
  ASSERT_TRUE(forked.ok()) << forked.status();
  EXPECT_TRUE(IsWhole(forked->sequence_id(), 50));
}

TEST_F(ForkWithTiersTest, OthersMoveDownForItsPagesWhichLieBelow) {
  const SequenceId parent = OpenAndFinish(50);
  while (store_->FlushBatch(0) > 0) {
  }
  ASSERT_EQ(store_->HostBytes(parent), 0);
  const SequenceId other = OpenAndFinish(64);
  FillHost(6);
  const auto forked = Fork(parent);
  ASSERT_TRUE(forked.ok()) << forked.status();
  EXPECT_TRUE(IsWhole(parent, 50));
  EXPECT_TRUE(IsWhole(forked->sequence_id(), 50));
  EXPECT_TRUE(IsWhole(other));
  EXPECT_LT(store_->HostBytes(other), 16 * kUnit);
}

TEST_F(ForkWithTiersTest, OneThatIsDamagedBelowIsDataLoss) {
  const SequenceId parent = OpenAndFinish(50);
  while (store_->FlushBatch(0) > 0) {
  }
  ASSERT_TRUE(disk_->Damage({.sequence = parent,
                             .fingerprint = FingerprintIdOf(TestFingerprint()),
                             .layer = 1,
                             .kv_head = 1,
                             .page = 2}));
  for (int i = 0; i < 2; ++i) {
    const absl::Status refused = Fork(parent).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("page 2"));
  }
}

TEST_F(ForkWithTiersTest, WhereTheTierBelowIsAwayItMayBeTriedAgain) {
  const SequenceId parent = OpenAndFinish(50);
  while (store_->FlushBatch(0) > 0) {
  }
  disk_->SetReachable(false);
  EXPECT_EQ(Fork(parent).status().code(), absl::StatusCode::kUnavailable);
  disk_->SetReachable(true);
  EXPECT_TRUE(Fork(parent).ok());
}

}  // namespace
}  // namespace heavywater
