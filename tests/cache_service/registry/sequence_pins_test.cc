// Pins, and room in the quotas of tenants.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "cache_service/base/shortage.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/host_page_store.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/cache_service/tier/memory_state.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kUnit = 4096;

// One rank, room for 40 pages; a prompt of 64 tokens takes 16, a sequence one unit more.
class SequencePinsTest : public ::testing::Test {
 protected:
  SequencePinsTest() { Form(); }
  void Form() {
    registry_.groups().Join(registry_.groups().NewTicket(), TestJoin(0, 1),
                            [this](absl::StatusOr<v1::JoinResponse> joined) {
                              ASSERT_TRUE(joined.ok()) << joined.status();
                              epoch_ = joined->epoch();
                            });
  }
  absl::StatusOr<SequenceId> Open(const std::string& tenant = "", int64_t prompt_tokens = 64) {
    v1::OpenSequenceRequest request = TestOpen(absl::StrCat("request-", ++opened_), epoch_);
    request.set_prompt_tokens(prompt_tokens);
    request.set_tenant(tenant);
    const auto opened = registry_.Open(request);
    if (!opened.ok()) return opened.status();
    return opened->sequence_id();
  }
  SequenceId OpenAndFinish(const std::string& tenant = "") {
    const auto id = Open(tenant);
    EXPECT_TRUE(id.ok()) << id.status();
    EXPECT_TRUE(
        store_.Reserve({.sequence = *id, .heads = {0, 2}, .num_pages = 4}, /*direct=*/true).ok());
    EXPECT_TRUE(registry_.ReportPlan(TestFinished(epoch_, *id, 64)).ok());
    clock_.Advance(absl::Milliseconds(10));
    return *id;
  }
  absl::StatusOr<v1::PinResponse> Pin(SequenceId id, const std::string& owner, int64_t ttl_ms) {
    v1::PinRequest request;
    request.set_sequence_id(id);
    request.set_owner(owner);
    request.set_ttl_ms(ttl_ms);
    request.set_unpin(ttl_ms == 0);
    return registry_.sequences().Pin(request);
  }
  bool IsThere(SequenceId id) { return registry_.sequences().FindOwner(id).ok(); }
  int64_t NumPins() { return registry_.sequences().CountPinned().pins; }

  FakeClock clock_;
  MemoryState state_;
  HostPageStore store_{*Slab::Create("", 40 * kUnit)};
  Registry registry_{RegistryOptions{.max_suspended_bytes = 20 * kUnit, .max_pins = 2}, store_,
                     clock_, &state_};
  Epoch epoch_ = 0;
  int opened_ = 0;
};

TEST_F(SequencePinsTest, APinnedSequenceMakesNoRoomAndOutlivesItsLease) {
  const SequenceId pinned = OpenAndFinish();
  const SequenceId other = OpenAndFinish();
  const auto pin = Pin(pinned, "me", 3'600'000);
  ASSERT_TRUE(pin.ok()) << pin.status();
  EXPECT_EQ(pin->pins(), 1);
  EXPECT_EQ(pin->host_bytes(), 16 * kUnit);
  ASSERT_TRUE(Open().ok());
  EXPECT_TRUE(IsThere(pinned)) << "although it was unused longest";
  EXPECT_FALSE(IsThere(other));
  clock_.Advance(absl::Minutes(30));
  registry_.Tick();
  EXPECT_TRUE(IsThere(pinned));
  EXPECT_EQ(registry_.sequences().CountPinned().host_bytes, 16 * kUnit);
  clock_.Advance(absl::Minutes(30));
  registry_.Tick();
  EXPECT_FALSE(IsThere(pinned)) << "its lease was over long ago";
  EXPECT_EQ(NumPins(), 0);
  const auto ended = registry_.sequences().TakeEndedPins();
  ASSERT_EQ(ended.size(), 1u);
  EXPECT_EQ(ended[0].owner, "me");
}

TEST_F(SequencePinsTest, EachOwnerHasOnePinAndThereAreNoMoreThanTheLimit) {
  const SequenceId id = OpenAndFinish();
  ASSERT_TRUE(Pin(id, "a", 1000).ok());
  ASSERT_TRUE(Pin(id, "a", 5000).ok()) << "anew";
  EXPECT_EQ(NumPins(), 1);
  ASSERT_TRUE(Pin(id, "b", 1000).ok());
  const absl::Status refused = Pin(id, "c", 1000).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("max_pins is 2"));
  clock_.Advance(absl::Seconds(2));
  registry_.Tick();
  EXPECT_EQ(NumPins(), 1) << "b's is over, a's is the later one";
  EXPECT_EQ(Pin(id, "b", 0).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(NumPins(), 1) << "never below what is there";
  EXPECT_EQ(Pin(id, "a", 0)->pins(), 0);
  EXPECT_EQ(NumPins(), 0);
  EXPECT_EQ(Pin(999, "a", 1000).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(Pin(id, "", 1000).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(SequencePinsTest, PinsHoldNoMoreHostMemoryThanTheyMayAndEndWithTheirSequence) {
  const SequenceId first = OpenAndFinish();
  const SequenceId second = OpenAndFinish();
  ASSERT_TRUE(Pin(first, "a", 1000).ok());
  const absl::Status refused = Pin(second, "a", 1000).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("pinned and suspended"));
  v1::CloseSequenceRequest close;
  close.set_sequence_id(first);
  ASSERT_TRUE(registry_.sequences().Close(close).ok());
  EXPECT_EQ(NumPins(), 0);
  EXPECT_TRUE(state_.Records().count(StateKey(StateKind::kPins, first)) == 0);
  EXPECT_TRUE(Pin(second, "a", 1000).ok());
}

TEST_F(SequencePinsTest, ATenantWithAFullQuotaLosesItsOwnFinishedSequencesOnly) {
  store_.tenants().SetLimits("acme", TenantLimits{.host_bytes = 20 * kUnit});
  const SequenceId others = OpenAndFinish("other");
  const SequenceId own = OpenAndFinish("acme");
  const auto next = Open("acme");
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_TRUE(IsThere(others)) << "although it was unused longer";
  EXPECT_FALSE(IsThere(own));
  const absl::Status refused = Open("acme").status();
  EXPECT_EQ(ShortageOf(refused)->subject, "tenant:acme/host_bytes");
  EXPECT_TRUE(IsThere(others));
  EXPECT_TRUE(IsThere(*next)) << "it is being written";
}

TEST_F(SequencePinsTest, TheNumberOfATenantsSequencesIsBoundedLikewise) {
  store_.tenants().SetLimits("acme", TenantLimits{.sequences = 1});
  const SequenceId own = OpenAndFinish("acme");
  ASSERT_TRUE(Open("acme", 1).ok());
  EXPECT_FALSE(IsThere(own));
  const absl::Status refused = Open("acme", 1).status();
  EXPECT_EQ(ShortageOf(refused)->subject, "tenant:acme/sequences");
  EXPECT_TRUE(Open("other", 1).ok());
}

TEST_F(SequencePinsTest, QuotasAndPinsAreThereAgainAfterARestart) {
  v1::SetQuotaRequest quota;
  quota.set_tenant("acme");
  quota.mutable_quota()->set_host_bytes(7);
  ASSERT_TRUE(registry_.quotas().Set(quota).ok());
  quota.set_tenant("gone");
  ASSERT_TRUE(registry_.quotas().Set(quota).ok());
  quota.clear_quota();
  quota.set_use_default(true);
  ASSERT_TRUE(registry_.quotas().Set(quota).ok());
  store_.tenants().SetLimits("acme", std::nullopt);
  TenantQuotas again(store_.tenants(), &state_);
  ASSERT_TRUE(again.Restore().ok());
  EXPECT_EQ(store_.tenants().Find("acme").limits.host_bytes, 7);
  EXPECT_FALSE(store_.tenants().Find("gone").own_limits);
}

// They stop by their own clocks, and may come back with addresses that are others' by then.
TEST_F(SequencePinsTest, RanksThatWereSilentForTooLongWriteAgainOnlyOnceItIsReopened) {
  const SequenceId id = *Open();
  ASSERT_TRUE(store_.Reserve({.sequence = id, .heads = {0, 2}, .num_pages = 4}, true).ok());
  ASSERT_TRUE(Pin(id, "me", 600'000).ok());
  v1::HeartbeatRequest heartbeat;
  heartbeat.set_group("group");
  heartbeat.set_epoch(epoch_);
  const auto is_unknown = [&](bool lists) {
    heartbeat.clear_sequence_ids();
    if (lists) heartbeat.add_sequence_ids(id);
    const auto heard = registry_.Heartbeat(heartbeat);
    EXPECT_TRUE(heard.ok()) << heard.status();
    return heard.ok() && heard->unknown_sequence_ids_size() > 0;
  };
  const auto pass = [&](int seconds, bool lists) {
    for (int i = 0; i < seconds; ++i) {
      clock_.Advance(absl::Seconds(1));
      EXPECT_FALSE(is_unknown(lists));
      registry_.Tick();
    }
  };
  pass(70, /*lists=*/true);
  EXPECT_TRUE(store_.HasWriters(id));
  pass(64, /*lists=*/false);
  EXPECT_TRUE(registry_.CheckWriter(id, 0, epoch_).ok());
  EXPECT_TRUE(store_.HasWriters(id)) << "the lease, and the time that a write has to end";
  pass(2, /*lists=*/false);
  EXPECT_FALSE(store_.HasWriters(id));
  EXPECT_EQ(registry_.AdmitWriter(id, 0, epoch_).status().code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(is_unknown(/*lists=*/true));
  EXPECT_TRUE(IsThere(id));
}

}  // namespace
}  // namespace heavywater
