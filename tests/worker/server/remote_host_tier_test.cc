// The host tier of a rank against a real cache service.
#include "worker/server/remote_host_tier.h"

#include <atomic>

#include "gmock/gmock.h"
#include "tests/worker/server/registering_backend.h"
#include "tests/worker/server/remote_host_tier_fixture.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST_F(RemoteHostTierTest, PagesAreThereBeforeTheyAreAskedForAsFarAsTheSequenceMayGet) {
  Join(/*heartbeats=*/false, {.reserve_ahead_tokens = 32});
  const SequenceId sequence = Open(/*max_tokens=*/80);
  // Published + ahead + one page.
  ASSERT_TRUE(Eventually([&] { return tier_->reserved_bytes() == 3 * kTierPageRow; }));
  EXPECT_TRUE(tier_->uses_slab());
  ASSERT_TRUE(Write(sequence, 0, 16, 7));
  tier_->Publish(sequence, 16);
  ASSERT_TRUE(Eventually([&] { return tier_->reserved_bytes() == 4 * kTierPageRow; }));
  ASSERT_TRUE(Write(sequence, 16, 48, 7));
  tier_->Publish(sequence, 64);
  ASSERT_TRUE(Eventually([&] { return tier_->reserved_bytes() == 5 * kTierPageRow; }));
  absl::SleepFor(absl::Milliseconds(100));
  EXPECT_EQ(tier_->reserved_bytes(), 5 * kTierPageRow) << "80 tokens are 5 pages";
  EXPECT_TRUE(ReadsBack(sequence, 63, 7));
}

TEST_F(RemoteHostTierTest, RowsWaitHereForAGrantThatComesLate) {
  for (const bool stream : {false, true}) {
    // No call waits: what is asked for at once is held here first.
    Join(/*heartbeats=*/false, {.disable_slab = stream,
                                .reserve_ahead_tokens = 0,
                                .reserve_timeout = absl::ZeroDuration()});
    const SequenceId sequence = Open();
    ASSERT_TRUE(tier_->Reserve(sequence, 0, 4).ok());
    ASSERT_TRUE(Write(sequence, 0, 60, 9));
    tier_->Publish(sequence, 60);
    EXPECT_TRUE(tier_->Flush(absl::Seconds(10)));
    EXPECT_TRUE(ReadsBack(sequence, 0, 9));
    EXPECT_TRUE(ReadsBack(sequence, 59, 9));
    EXPECT_EQ(tier_->uses_slab(), !stream);
  }
}

TEST_F(RemoteHostTierTest, AFullTierSaysSoAndWhatWasOnlyAheadStandsInNoOnesWay) {
  Join(/*heartbeats=*/false, {.reserve_ahead_tokens = 16 * 1000});
  const SequenceId sequence = Open(/*max_tokens=*/16 * 1000);
  // 63: the watermarks take one unit.
  ASSERT_TRUE(tier_->Reserve(sequence, 0, 63).ok());
  const absl::Status full = tier_->Reserve(sequence, 63, 4);
  EXPECT_EQ(full.code(), absl::StatusCode::kResourceExhausted) << full;
  EXPECT_THAT(std::string(full.message()),
              AllOf(HasSubstr("need"), HasSubstr(std::to_string(64 * kTierPageRow))));
  EXPECT_TRUE(Write(sequence, 63 * 16 - 1, 1, 5)) << "what it has, it keeps";
}

TEST_F(RemoteHostTierTest, PagesLeftOutAfterARefusalStayWithoutMemory) {
  Join(/*heartbeats=*/false, {.reserve_ahead_tokens = 0});
  const SequenceId hog = Open(/*max_tokens=*/16 * 60);
  ASSERT_TRUE(tier_->Reserve(hog, 0, 60).ok());
  const SequenceId sequence = Open(/*max_tokens=*/16 * 60);
  ASSERT_TRUE(tier_->Reserve(sequence, 0, 1).ok());
  ASSERT_TRUE(absl::IsResourceExhausted(tier_->Reserve(sequence, 1, 3)));
  tier_->CloseSequence(hog);
  ASSERT_TRUE(service_.Close(hog).ok());
  // The rank gave up pages 1 and 2, and asks for 3 when it comes to it.
  ASSERT_TRUE(Write(sequence, 0, 16, 3));
  tier_->Publish(sequence, 48);
  EXPECT_EQ(tier_->Page(sequence, 0, 0, 3), nullptr);
  ASSERT_TRUE(Eventually([&] { return tier_->Reserve(sequence, 3, 1).ok(); }));
  EXPECT_EQ(tier_->Page(sequence, 0, 0, 1), nullptr);
  EXPECT_EQ(tier_->Page(sequence, 0, 0, 2), nullptr);
  ASSERT_TRUE(Write(sequence, 48, 1, 4));
  tier_->Publish(sequence, 49);
  EXPECT_TRUE(ReadsBack(sequence, 0, 3));
  EXPECT_TRUE(ReadsBack(sequence, 48, 4));
  EXPECT_FALSE(service_.ReadRow(sequence, 1, 1, 16).ok());
}

TEST_F(RemoteHostTierTest, AnOutageIsBridgedHereUpToALimitThatIsNamed) {
  Join(/*heartbeats=*/true, {.reserve_ahead_tokens = 0, .max_local_bytes = 4 * kTierPageRow});
  const SequenceId sequence = Open();
  ASSERT_TRUE(tier_->Reserve(sequence, 0, 1).ok());
  service_.Stop();
  ASSERT_TRUE(Eventually([&] { return !link_->up(); }));
  ASSERT_TRUE(tier_->Reserve(sequence, 0, 4).ok());
  ASSERT_TRUE(Write(sequence, 0, 64, 1));
  tier_->Publish(sequence, 64);
  const absl::Status refused = tier_->Reserve(sequence, 4, 4);
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable) << "an outage never stops a sequence";
  EXPECT_THAT(std::string(refused.message()), HasSubstr(std::to_string(4 * kTierPageRow)));
}

TEST_F(RemoteHostTierTest, AServiceThatReturnsWithoutTheSequenceGetsNoMoreOfIt) {
  Join(/*heartbeats=*/true, {.reserve_ahead_tokens = 0});
  const SequenceId sequence = Open();
  ASSERT_TRUE(tier_->Reserve(sequence, 0, 1).ok());
  service_.Stop();
  ASSERT_TRUE(Eventually([&] { return !link_->up(); }));
  ASSERT_TRUE(tier_->Reserve(sequence, 1, 1).ok());
  clock_.Advance(absl::Seconds(1));  // ids begin at the start time
  service_.Start();
  EXPECT_TRUE(Eventually([&] { return tier_->Page(sequence, 0, 0, 1) == nullptr; }));
  EXPECT_EQ(tier_->Reserve(sequence, 2, 1).code(), absl::StatusCode::kUnavailable);
  // New ones get pages in the new slab.
  ASSERT_TRUE(Eventually([&] { return link_->up(); }));
  const SequenceId next = Open();
  ASSERT_TRUE(tier_->Reserve(next, 0, 1).ok());
  ASSERT_TRUE(Write(next, 0, 4, 2));
  tier_->Publish(next, 4);
  EXPECT_TRUE(Eventually([&] { return ReadsBack(next, 3, 2); }));
}

TEST_F(RemoteHostTierTest, AClosedSequenceIsHandedOverAndThenForgotten) {
  Join(/*heartbeats=*/true, {.disable_slab = true, .reserve_ahead_tokens = 0});
  const SequenceId sequence = Open();
  ASSERT_TRUE(tier_->Reserve(sequence, 0, 4).ok());
  ASSERT_TRUE(Write(sequence, 0, 50, 8));
  tier_->Publish(sequence, 50);
  tier_->CloseSequence(sequence);
  std::atomic<bool> written = false;
  tier_->WhenWritten(sequence, [&] { written = true; });
  EXPECT_EQ(tier_->Page(sequence, 0, 0, 0), nullptr);
  EXPECT_FALSE(tier_->Reserve(sequence, 4, 1).ok());
  ASSERT_TRUE(Eventually([&] { return written.load(); }));
  EXPECT_TRUE(ReadsBack(sequence, 49, 8));
  EXPECT_TRUE(Eventually([&] { return tier_->reserved_bytes() == 0; }));
  EXPECT_EQ(link_->RenewedAt(sequence), absl::InfinitePast()) << "no longer listed";
}

TEST_F(RemoteHostTierTest, NothingToWriteCallsBackAtOnceAndAForgottenOneLeavesNothing) {
  Join(/*heartbeats=*/false);
  bool written = false;
  tier_->WhenWritten(77, [&] { written = true; });
  EXPECT_TRUE(written);
  tier_->Expect(77, 100, kTierLease);
  tier_->Forget(77);
  EXPECT_FALSE(tier_->Reserve(77, 0, 1).ok());
  const SequenceId sequence = Open();
  EXPECT_EQ(tier_->OpenSequence(sequence, kTierGeometry, kTierHeads).code(),
            absl::StatusCode::kAlreadyExists);
}

TEST_F(RemoteHostTierTest, EveryPageLiesInMemoryThatTheBackendKnows) {
  for (const bool disable_slab : {false, true}) {
    RegisteringBackend backend;
    Join(/*heartbeats=*/true, {.disable_slab = disable_slab, .backend = &backend});
    const SequenceId sequence = Open();
    ASSERT_TRUE(tier_->Reserve(sequence, 0, 3).ok());
    EXPECT_TRUE(backend.IsRegistered(tier_->Page(sequence, 1, 1, 2)));
    EXPECT_EQ(tier_->uses_slab(), !disable_slab);
    tier_.reset();
    EXPECT_EQ(backend.num_registered(), 0);
    link_.reset();
  }
}

TEST_F(RemoteHostTierTest, ASlabThatCannotBeRegisteredIsNotUsed) {
  RegisteringBackend backend;
  backend.Refuse();
  Join(/*heartbeats=*/true, {.backend = &backend});
  EXPECT_FALSE(tier_->uses_slab());
  tier_.reset();
}

}  // namespace
}  // namespace heavywater
