// Room in the host tier where there are tiers below it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

#include "cache_service/base/shortage.h"
#include "cache_service/registry/layout.h"
#include "tests/cache_service/registry/tiers_fixture.h"

namespace heavywater {
namespace {

using ReclaimWithTiersTest = TiersFixture;

TEST_F(ReclaimWithTiersTest, FinishedSequencesMoveDownBeforeAnyIsEnded) {
  std::vector<SequenceId> finished;
  for (int i = 0; i < 3; ++i) finished.push_back(OpenAndFinish());
  EXPECT_EQ(registry_->sequences().num_reclaimed(), 0);
  EXPECT_GT(store_->Stats().moved_down, 0);
  for (const SequenceId id : finished) EXPECT_TRUE(IsWhole(id));
  const auto described = registry_->sequences().Get(finished[0]);
  ASSERT_TRUE(described.ok());
  EXPECT_EQ(described->host_bytes(), store_->HostBytes(finished[0]));
}

TEST_F(ReclaimWithTiersTest, OnceNoTierHasRoomTheLongestUnusedIsEndedInAllOfThem) {
  std::vector<SequenceId> ids;
  for (int i = 0; i < 6; ++i) ids.push_back(OpenAndFinish());
  EXPECT_GT(registry_->sequences().num_reclaimed(), 0);
  EXPECT_FALSE(registry_->sequences().FindOwner(ids[0]).ok());
  EXPECT_TRUE(IsWhole(ids[4]));
  EXPECT_TRUE(IsWhole(ids[5]));
  while (store_->Turn()) {
  }
  int64_t bytes = 0;
  for (const SequenceId id : ids) bytes += store_->SequenceBytes(id);
  const PageStoreStats stats = store_->Stats();
  EXPECT_EQ(bytes, (stats.pages + stats.below.at(0).pages) * kUnit) << "nothing is left of others";
}

TEST_F(ReclaimWithTiersTest, ATierThatIsAwayCostsFinishedSequencesNotNewOnes) {
  const SequenceId first = OpenAndFinish();
  const SequenceId second = OpenAndFinish();
  disk_->SetReachable(false);
  const auto third = Open();
  ASSERT_TRUE(third.ok()) << third.status();
  EXPECT_FALSE(registry_->sequences().FindOwner(first).ok());
  EXPECT_TRUE(IsWhole(second)) << "no more than was needed";
}

TEST_F(ReclaimWithTiersTest, OneThatComesBackEndsFinishedOnesWhereNoTierHasRoom) {
  const SequenceId back = OpenAndFinish();
  v1::SuspendSequenceRequest suspend;
  suspend.set_sequence_id(back);
  ASSERT_TRUE(registry_->sequences().Suspend(suspend).ok());
  const SequenceId oldest = OpenAndFinish();
  while (store_->FlushBatch(0) > 0) {
  }
  ASSERT_EQ(disk_->Stats().free_bytes, 0);
  const SequenceId next = OpenAndFinish();
  const SequenceId last = OpenAndFinish();
  FillHost(0);
  const absl::Status status = registry_->sequences().BringUp(back);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(store_->HostBytes(back), 16 * kUnit);
  EXPECT_TRUE(IsWhole(back));
  EXPECT_FALSE(registry_->sequences().FindOwner(oldest).ok());
  EXPECT_TRUE(IsWhole(next)) << "no more than was needed";
  EXPECT_TRUE(IsWhole(last));
}

TEST_F(ReclaimWithTiersTest, NoneEndsForOneThatWouldNotFitEvenSo) {
  const SequenceId back = OpenAndFinish();
  while (store_->FlushBatch(0) > 0) {
  }
  disk_->LimitPuts(0);
  const SequenceId finished = OpenAndFinish(16);
  OpenAndWrite(64);
  const auto filling = OpenAndWrite(32);  // 5 + 17 + 17, of whose promise half is left
  const absl::Status status = registry_->sequences().BringUp(back);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  const auto shortage = ShortageOf(status);
  ASSERT_TRUE(shortage.has_value());
  EXPECT_EQ(shortage->subject, "host_bytes");
  EXPECT_EQ(shortage->need, 16 * kUnit);
  EXPECT_TRUE(IsWhole(finished, 16));
  EXPECT_TRUE(IsWhole(filling, 32));
  EXPECT_TRUE(IsWhole(back));
}

TEST_F(ReclaimWithTiersTest, SequencesThatAreBeingWrittenStayAndTheRefusalNamesThem) {
  const SequenceId first = OpenAndWrite();
  const SequenceId second = OpenAndWrite();
  const absl::Status refused = Open().status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              ::testing::HasSubstr("2 sequences that are being written hold 131072 bytes"));
  EXPECT_TRUE(IsWhole(first));
  EXPECT_TRUE(IsWhole(second));
  EXPECT_EQ(store_->Stats().moved_down, 0);
}

TEST(FingerprintIdTest, EveryFieldCounts) {
  const v1::Fingerprint one = TestFingerprint();
  EXPECT_EQ(FingerprintIdOf(one), FingerprintIdOf(TestFingerprint()));
  v1::Fingerprint other = one;
  other.set_page_tokens(32);
  EXPECT_NE(FingerprintIdOf(one), FingerprintIdOf(other));
  other = one;
  other.set_model("test-model-2");
  EXPECT_NE(FingerprintIdOf(one), FingerprintIdOf(other));
}

}  // namespace
}  // namespace heavywater
