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
  ASSERT_TRUE(store_->Release(kFiller).ok());
  store_->StopWriter(kFiller, 0);
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

// The page in which the tokens end is copied: it has a seal where it has been below.
TEST_F(ForkWithTiersTest, APageThatIsNotFullAndHasChangedInTheSlabIsDataLoss) {
  const SequenceId parent = OpenAndFinish(50);
  while (store_->FlushBatch(0) > 0) {
  }
  ASSERT_TRUE(store_->BringUp(parent).ok());
  ASSERT_TRUE(Fork(parent).ok());
  // All rows are of this byte, and what lies behind them is zero.
  const auto byte = static_cast<std::byte>(opened_);
  int damaged = 0;
  for (int64_t at = 0; at < 40 * kUnit && damaged == 0; at += kUnit) {
    std::byte* const page = store_->slab().At(at);
    const bool two_rows = page[2 * 256 - 1] == byte && page[2 * 256] == std::byte{0};
    if (!two_rows) continue;
    page[3] ^= std::byte{1};
    ++damaged;
  }
  ASSERT_EQ(damaged, 1);
  for (int i = 0; i < 2; ++i) {
    const absl::Status refused = Fork(parent).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kDataLoss) << refused;
    EXPECT_THAT(std::string(refused.message()), HasSubstr("page 3"));
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
