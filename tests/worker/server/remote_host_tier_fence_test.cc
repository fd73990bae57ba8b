// A rank stops writing into the slab before the service may give pages to others.
#include "gmock/gmock.h"
#include "heavywater/v1/admin.grpc.pb.h"
#include "tests/worker/server/remote_host_tier_fixture.h"

namespace heavywater {
namespace {

// The lease of 20 s less the margin, a tenth of it and at most 2 s.
constexpr absl::Duration kFence = absl::Seconds(18);
constexpr absl::Duration kMoment = absl::Milliseconds(1);

class RemoteHostTierFenceTest : public RemoteHostTierTest {
 protected:
  // One page in the slab, granted now.
  SequenceId OpenWithPage(bool stream = false) {
    Join(/*heartbeats=*/false, {.disable_slab = stream, .reserve_ahead_tokens = 0});
    const SequenceId sequence = Open();
    EXPECT_TRUE(tier_->Reserve(sequence, 0, 2).ok());
    EXPECT_TRUE(Write(sequence, 0, 4, 1));
    tier_->Publish(sequence, 4);
    return sequence;
  }
  int64_t UsedBytes() {
    grpc::ClientContext context;
    v1::StatsResponse response;
    v1::AdminService::NewStub(service_.Channel())->Stats(&context, {}, &response);
    return response.tiers(0).used_bytes();
  }
};

TEST_F(RemoteHostTierFenceTest, ARankThatHearsNothingStopsBeforeItsLeaseIsOver) {
  const SequenceId sequence = OpenWithPage();
  clock_.Advance(kFence - kMoment);
  EXPECT_TRUE(Write(sequence, 4, 1, 2));
  tier_->Publish(sequence, 5);
  EXPECT_TRUE(ReadsBack(sequence, 4, 2));
  clock_.Advance(kMoment);
  EXPECT_FALSE(Write(sequence, 5, 1, 3));
  EXPECT_TRUE(service_.Get(sequence).ok()) << "at the service the lease ends later";
  EXPECT_EQ(tier_->Reserve(sequence, 2, 1).code(), absl::StatusCode::kUnavailable)
      << "later rows find no place either";
}

TEST_F(RemoteHostTierFenceTest, TheWatermarkDoesNotMoveAfterTheFence) {
  const SequenceId sequence = OpenWithPage();
  ASSERT_TRUE(Write(sequence, 4, 4, 2));
  clock_.Advance(kFence);
  tier_->Publish(sequence, 8);
  EXPECT_TRUE(ReadsBack(sequence, 3, 1));
  EXPECT_EQ(service_.ReadRow(sequence, 1, 1, 4).status().code(), absl::StatusCode::kOutOfRange);
}

TEST_F(RemoteHostTierFenceTest, PagesAreReclaimedOnlyAfterTheFenceAlsoWhenAClientClosesEarly) {
  const SequenceId sequence = OpenWithPage();
  ASSERT_TRUE(service_.Close(sequence).ok());
  clock_.Advance(kFence - kMoment);
  absl::SleepFor(absl::Milliseconds(200));  // ticks
  ASSERT_TRUE(Write(sequence, 4, 1, 2)) << "not fenced";
  EXPECT_GT(UsedBytes(), 0) << "so the pages must be there";
  clock_.Advance(kMoment);
  ASSERT_FALSE(Write(sequence, 5, 1, 2)) << "fenced";
  clock_.Advance(absl::Seconds(2));  // the lease ends
  absl::SleepFor(absl::Milliseconds(200));
  EXPECT_GT(UsedBytes(), 0) << "a write under way has time to end";
  clock_.Advance(absl::Seconds(1));
  EXPECT_TRUE(Eventually([&] { return UsedBytes() == 0; }));
}

TEST_F(RemoteHostTierFenceTest, AnAcceptedHeartbeatMovesTheFenceFromWhenItWasSent) {
  const SequenceId sequence = OpenWithPage();
  // Not so far that the rank loses its membership, and has to join again first.
  clock_.Advance(absl::Milliseconds(900));
  link_->StartHeartbeats();
  ASSERT_TRUE(Eventually([&] { return link_->RenewedAt(sequence) == clock_.Now(); }));
  service_.Stop();
  clock_.Advance(kFence - kMoment);
  EXPECT_TRUE(Write(sequence, 4, 1, 2));
  clock_.Advance(kMoment);
  EXPECT_FALSE(Write(sequence, 5, 1, 2));
}

TEST_F(RemoteHostTierFenceTest, HeldRowsAreNotCopiedIntoTheSlabAfterTheFence) {
  const SequenceId sequence = OpenWithPage();
  service_.Stop();
  link_->Note(absl::UnavailableError("stopped"));
  ASSERT_TRUE(tier_->Reserve(sequence, 2, 1).ok());  // held here
  clock_.Advance(kFence);
  EXPECT_EQ(tier_->Page(sequence, 0, 0, 2), nullptr) << "nobody will take them";
}

TEST_F(RemoteHostTierFenceTest, StreamedPagesNeedNoFence) {
  const SequenceId sequence = OpenWithPage(/*stream=*/true);
  clock_.Advance(kFence);
  EXPECT_TRUE(Write(sequence, 4, 1, 2));
}

TEST_F(RemoteHostTierFenceTest, AnEndedSequenceIsListedUntilTheStepHasWrittenWhatItBegan) {
  Join(/*heartbeats=*/true, {.reserve_ahead_tokens = 0});
  const SequenceId sequence = Open();
  ASSERT_TRUE(tier_->Reserve(sequence, 0, 1).ok());
  ASSERT_TRUE(Eventually([&] { return link_->RenewedAt(sequence) != absl::InfinitePast(); }));
  ASSERT_NE(tier_->Page(sequence, 0, 0, 0), nullptr);  // the step writes to it
  ASSERT_TRUE(service_.Close(sequence).ok());
  ASSERT_TRUE(Eventually([&] { return tier_->Page(sequence, 0, 0, 0) == nullptr; }));
  absl::SleepFor(absl::Milliseconds(600));  // some heartbeats
  EXPECT_GT(UsedBytes(), 0) << "the step may be writing still";
  tier_->Publish(sequence, 1);
  EXPECT_TRUE(Eventually([&] { return UsedBytes() == 0; }));
}

}  // namespace
}  // namespace heavywater
