// Room in the host tier where there are tiers below it.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache_service/registry/layout.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/ordered_page_store.h"
#include "cache_service/tier/stored_page.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/cache_service/tier/fake_tier.h"

namespace heavywater {
namespace {

constexpr int64_t kUnit = 4096;

// One rank. The slab has room for 40 pages, the tier below for 32; a sequence of 64
// tokens takes 16 pages, and of the slab one unit more.
class ReclaimWithTiersTest : public ::testing::Test {
 protected:
  ReclaimWithTiersTest() {
    auto disk = std::make_unique<FakeTier>("disk", 32 * StoredBytes(kUnit));
    disk_ = disk.get();
    std::vector<std::unique_ptr<LowerTier>> below;
    below.push_back(std::move(disk));
    store_ = std::make_unique<OrderedPageStore>(
        std::make_unique<HostPageStore>(*Slab::Create("", 40 * kUnit)), std::move(below),
        OrderedStoreOptions{.max_move_bytes = 4 * kUnit}, clock_);
    registry_ = std::make_unique<Registry>(RegistryOptions{}, *store_, clock_);
    registry_->groups().Join(registry_->groups().NewTicket(), TestJoin(0, 1),
                             [this](absl::StatusOr<v1::JoinResponse> joined) {
                               ASSERT_TRUE(joined.ok()) << joined.status();
                               epoch_ = joined->epoch();
                             });
  }

  absl::StatusOr<SequenceId> Open() {
    v1::OpenSequenceRequest request = TestOpen(absl::StrCat("request-", ++opened_), epoch_);
    request.set_prompt_tokens(64);
    const auto opened = registry_->Open(request);
    if (!opened.ok()) return opened.status();
    return opened->sequence_id();
  }
  // Its 64 tokens written and committed.
  SequenceId OpenAndWrite() {
    const auto id = Open();
    EXPECT_TRUE(id.ok()) << id.status();
    const std::vector<std::byte> bytes(kUnit, static_cast<std::byte>(opened_));
    EXPECT_TRUE(store_->Reserve({.sequence = *id, .heads = {0, 2}, .num_pages = 4}, false).ok());
    for (int i = 0; i < 16; ++i) {
      const RowRange rows = {*id, i / 8, i / 4 % 2, i % 4 * 16, 16};
      EXPECT_TRUE(store_->Write(0, rows, bytes).ok());
    }
    EXPECT_TRUE(store_->Commit(*id, 0, 64).ok());
    clock_.Advance(absl::Milliseconds(10));
    return *id;
  }
  SequenceId OpenAndFinish() {
    const SequenceId id = OpenAndWrite();
    EXPECT_TRUE(registry_->ReportPlan(TestFinished(epoch_, id, 64)).ok());
    clock_.Advance(absl::Milliseconds(10));
    return id;
  }
  // All of its rows are there.
  bool IsWhole(SequenceId id) {
    for (int i = 0; i < 16; ++i) {
      std::vector<std::byte> bytes(kUnit);
      if (!store_->Read({id, i / 8, i / 4 % 2, i % 4 * 16, 16}, bytes).ok()) return false;
    }
    return true;
  }

  FakeClock clock_;
  FakeTier* disk_ = nullptr;
  std::unique_ptr<OrderedPageStore> store_;
  std::unique_ptr<Registry> registry_;
  Epoch epoch_ = 0;
  int opened_ = 0;
};

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
