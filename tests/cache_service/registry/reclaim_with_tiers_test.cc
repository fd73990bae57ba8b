// Room in the host tier where there are tiers below it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <vector>

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
