// What leaves the device is in host memory, or counted as dropped.
#include <cstring>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/rank/flaky_host_tier.h"
#include "tests/worker/rank/test_group.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr int kPage = 16;  // tokens

class WriteThroughTest : public ::testing::Test {
 protected:
  void Start(int world_size = 1, int kv_heads = 2, KvDtype dtype = KvDtype::kFloat32) {
    TestGroupOptions options;
    options.world_size = world_size;
    options.kv_heads = kv_heads;
    options.query_heads = 4;
    options.dtype = dtype;
    options.reserve_ahead_tokens = kPage;
    tiers_.resize(world_size);
    for (FlakyHostTier& tier : tiers_) options.tiers.push_back(&tier);
    group_ = std::make_unique<TestGroup>(options);
  }

  static SequenceOptions Sequence(OnHostFull on_host_full = OnHostFull::kStop) {
    SequenceOptions options = TestSequence(Policy::kH2o, Scope::kLayer, 6, 4, 20, 200);
    options.on_host_full = on_host_full;
    return options;
  }

  void Open(const SequenceOptions& options) {
    ASSERT_TRUE(group_->OpenAndRunPrompt(1, options, TestTokens(0, 20)).ok());
  }

  absl::Status AppendOne() {
    return group_->Append({{1, TestTokens(0, 1, group_->cache().Stats(1)->tokens_seen)}});
  }

  void AppendUntil(int64_t seen) {
    while (group_->cache().Stats(1)->tokens_seen < seen) {
      const absl::Status status = AppendOne();
      ASSERT_TRUE(status.ok()) << status;
    }
  }

  // The host row of a position, as floats, K then V; of any rank that has it.
  std::vector<float> HostRowOf(int layer, int kv_head, Position position) {
    for (FlakyHostTier& tier : tiers_) {
      if (!tier.is_open(1)) continue;
      const std::byte* page = tier.Page(1, layer, kv_head, position / kPage);
      if (page == nullptr) continue;
      std::vector<float> row(16);
      std::memcpy(row.data(), page + position % kPage * 64, 64);
      return row;
    }
    return {};
  }

  std::vector<FlakyHostTier> tiers_;
  std::unique_ptr<TestGroup> group_;
};

TEST_F(WriteThroughTest, EveryPositionOfEveryHeadAndLayerIsInItsHostPage) {
  Start(/*world_size=*/2);
  Open(Sequence());
  AppendUntil(50);
  for (int layer = 0; layer < 2; ++layer) {
    for (Position p = 0; p < 50; ++p) {
      const SyntheticRow row = group_->Rows(layer, TestTokens(0, 1, p), p);
      for (int head = 0; head < 2; ++head) {
        std::vector<float> want(row.k.begin() + head * 8, row.k.begin() + head * 8 + 8);
        want.insert(want.end(), row.v.begin() + head * 8, row.v.begin() + head * 8 + 8);
        EXPECT_EQ(HostRowOf(layer, head, p), want) << layer << " " << head << " " << p;
      }
    }
  }
  EXPECT_EQ(tiers_[0].watermark(1), 50);
  const SequenceStats stats = *group_->cache().Stats(1);
  EXPECT_EQ(stats.tokens_resident, 10);
  EXPECT_EQ(stats.tokens_demoted, 40);
  EXPECT_EQ(stats.tokens_dropped, 0);
  EXPECT_EQ(stats.host_bytes, tiers_[0].reserved_bytes());
}

TEST_F(WriteThroughTest, OfRanksThatShareAKvHeadOnlyTheLowestWrites) {
  Start(/*world_size=*/4, /*kv_heads=*/2);
  Open(Sequence());
  AppendUntil(30);
  EXPECT_TRUE(tiers_[0].is_open(1));
  EXPECT_FALSE(tiers_[1].is_open(1));
  EXPECT_TRUE(tiers_[2].is_open(1));
  EXPECT_FALSE(tiers_[3].is_open(1));
  EXPECT_EQ(HostRowOf(0, 1, 29).size(), 16u);
  EXPECT_EQ(group_->cache(1).Stats(1)->tokens_dropped, 0);
}

TEST_F(WriteThroughTest, PagesAreReservedAheadOfNeedAndNotBeyondTheMaximum) {
  Start();
  SequenceOptions options = Sequence();
  options.max_tokens = 50;
  Open(options);
  const int64_t page_bytes = kPage * 64 * 2 * 2;          // of both layers and heads
  EXPECT_EQ(tiers_[0].reserved_bytes(), 3 * page_bytes);  // 20 + 16 tokens
  AppendUntil(33);
  EXPECT_EQ(tiers_[0].reserved_bytes(), 4 * page_bytes);
  AppendUntil(50);
  EXPECT_EQ(tiers_[0].reserved_bytes(), 4 * page_bytes);
}

TEST_F(WriteThroughTest, AFullTierAtOpenRefusesTheSequence) {
  Start();
  const int64_t reserved = group_->cache().memory().reserved_bytes();
  tiers_[0].reserve_status = absl::ResourceExhaustedError("needs 5 bytes, limit 4");
  const absl::Status status = group_->Open(1, Sequence(OnHostFull::kDrop));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("needs 5 bytes, limit 4"));
  EXPECT_FALSE(tiers_[0].is_open(1));
  EXPECT_EQ(group_->cache().memory().reserved_bytes(), reserved);
}

TEST_F(WriteThroughTest, AFullTierStopsTheSequenceWhereItsPagesEnd) {
  Start(/*world_size=*/2);
  Open(Sequence(OnHostFull::kStop));
  // On one rank only: the other learns it in the reduce.
  tiers_[1].reserve_status = absl::ResourceExhaustedError("no room");
  AppendUntil(48);  // three pages were reserved
  const absl::Status status = AppendOne();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(group_->cache().Stats(1)->tokens_seen, 48);
  EXPECT_EQ(group_->cache().Stats(1)->tokens_dropped, 0);
  tiers_[1].reserve_status = absl::OkStatus();
  AppendUntil(60);  // it goes on when there is room
}

TEST_F(WriteThroughTest, AFullTierDropsWhatHasNoPageAndNeverCallsItDemoted) {
  Start();
  Open(Sequence(OnHostFull::kDrop));
  tiers_[0].reserve_status = absl::ResourceExhaustedError("no room");
  AppendUntil(60);
  SequenceStats stats = *group_->cache().Stats(1);
  EXPECT_EQ(stats.tokens_unbacked, 12);  // 48 to 59
  // The resident ones among them are not lost yet.
  EXPECT_LE(stats.tokens_dropped, 12 - 4);
  EXPECT_GT(stats.tokens_dropped, 0);
  EXPECT_EQ(stats.tokens_resident + stats.tokens_demoted + stats.tokens_dropped, 60);
  EXPECT_THAT(group_->cache().Report(1, false)->unbacked, ElementsAre(PositionRange{48, 60}));
  EXPECT_THAT(tiers_[0].skipped(1), ElementsAre(3)) << "the tier knows it at once";

  // Room again: from the next page on positions are kept.
  tiers_[0].reserve_status = absl::OkStatus();
  AppendUntil(90);
  EXPECT_THAT(group_->cache().Report(1, false)->unbacked, ElementsAre(PositionRange{48, 64}));
  stats = *group_->cache().Stats(1);
  EXPECT_EQ(stats.tokens_unbacked, 16);
  EXPECT_EQ(stats.tokens_resident + stats.tokens_demoted + stats.tokens_dropped, 90);
}

TEST_F(WriteThroughTest, AnOutageNeverStopsASequence) {
  Start();
  Open(Sequence(OnHostFull::kStop));
  tiers_[0].reserve_status = absl::UnavailableError("the service is away");
  AppendUntil(60);
  EXPECT_EQ(group_->cache().Stats(1)->tokens_unbacked, 12);
}

TEST_F(WriteThroughTest, WhenTheTierHasLostTheSequenceNothingCountsAsDemoted) {
  Start(/*world_size=*/2);
  Open(Sequence());
  AppendUntil(40);
  EXPECT_EQ(group_->cache().Stats(1)->tokens_demoted, 30);
  tiers_[0].Lose(1);
  for (const int64_t seen : {40, 44}) {
    AppendUntil(seen);
    const SequenceStats stats = *group_->cache().Stats(1);
    EXPECT_EQ(stats.tokens_resident, 10);
    EXPECT_EQ(stats.tokens_demoted, 0);
    EXPECT_EQ(stats.tokens_dropped, seen - 10);
    EXPECT_EQ(stats.host_bytes, 0);
    EXPECT_THAT(group_->cache().Report(1, false)->unbacked,
                ElementsAre(PositionRange{0, static_cast<Position>(seen)}));
  }
  EXPECT_EQ(group_->cache(1).Stats(1)->tokens_demoted, 34) << "each rank speaks for its heads";
}

TEST_F(WriteThroughTest, OnlyARankWithoutPagesVouchesForItsPositionsInReports) {
  Start(/*world_size=*/4, /*kv_heads=*/2);
  Open(Sequence());
  EXPECT_EQ(group_->cache(0).Report(1, false)->watermark, 0) << "the page store knows";
  EXPECT_EQ(group_->cache(1).Report(1, false)->watermark, 20) << "rank 0 writes its head's pages";
}

TEST_F(WriteThroughTest, AFailingTierIsNotAskedInEveryStep) {
  Start();
  Open(Sequence(OnHostFull::kDrop));
  tiers_[0].reserve_status = absl::UnavailableError("the service is away");
  const int64_t before = tiers_[0].num_reserves;
  AppendUntil(20 + 4 * kPage);
  EXPECT_LE(tiers_[0].num_reserves - before, 12);
}

TEST_F(WriteThroughTest, WithoutATierEvictedPositionsAreDropped) {
  group_ = std::make_unique<TestGroup>(TestGroupOptions{});
  Open(Sequence());
  AppendUntil(40);
  const SequenceStats stats = *group_->cache().Stats(1);
  EXPECT_EQ(stats.tokens_resident, 10);
  EXPECT_EQ(stats.tokens_demoted, 0);
  EXPECT_EQ(stats.tokens_dropped, 30);
  EXPECT_EQ(stats.tokens_unbacked, 40);
}

TEST_F(WriteThroughTest, ClosingClosesTheSequenceInTheTier) {
  Start();
  Open(Sequence());
  ASSERT_TRUE(group_->Close(1).ok());
  EXPECT_FALSE(tiers_[0].is_open(1));
}

TEST_F(WriteThroughTest, HostRowsHoldTheSlotsBytesInBfloat16) {
  Start(1, 2, KvDtype::kBFloat16);
  Open(Sequence());
  const Ledger residents = group_->Sets(1, 1)[0];
  for (const auto& [position, score] : residents) {
    const std::vector<std::byte> slot = *group_->cache().ReadResident(1, 1, 1, position);
    const std::byte* page = tiers_[0].Page(1, 1, 1, position / kPage);
    ASSERT_NE(page, nullptr);
    EXPECT_EQ(std::memcmp(slot.data(), page + position % kPage * 32, 32), 0);
  }
}

}  // namespace
}  // namespace heavywater
