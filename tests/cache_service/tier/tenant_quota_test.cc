// What tenants may hold of the tiers, and pages that stay where they are.
#include <gmock/gmock.h>

#include <optional>
#include <string>

#include "cache_service/base/shortage.h"
#include "cache_service/tier/tenant_book.h"
#include "tests/cache_service/tier/ordered_store_fixture.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(TenantBookTest, ARefusalNamesTenantNeedAndLimitAndHoldsNothing) {
  TenantBook book;
  book.SetLimits("acme", TenantLimits{.host_bytes = 100, .sequences = 2});
  ASSERT_TRUE(book.TryHold("acme", {.host_bytes = 70, .sequences = 1}).ok());
  const absl::Status refused = book.TryHold("acme", {.host_bytes = 31, .sequences = 1});
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(refused.message()),
              AllOf(HasSubstr("\"acme\""), HasSubstr("need 31"), HasSubstr("30 of 100")));
  const std::optional<Shortage> shortage = ShortageOf(refused);
  ASSERT_TRUE(shortage.has_value());
  EXPECT_EQ(shortage->subject, "tenant:acme/host_bytes");
  EXPECT_EQ(shortage->available, 30);
  const std::optional<TenantShortage> tenant = TenantShortageOf(refused);
  ASSERT_TRUE(tenant.has_value());
  EXPECT_EQ(tenant->tenant, "acme");
  EXPECT_EQ(tenant->what, "host_bytes");
  EXPECT_EQ(book.Find("acme").used.host_bytes, 70);
  EXPECT_EQ(book.Find("acme").used.sequences, 1);
  EXPECT_EQ(book.num_refused(), 1);
  EXPECT_EQ(TenantShortageOf(absl::ResourceExhaustedError("of a tier")), std::nullopt);
}

// Else its finished sequences would end for one that no room is enough for.
TEST(TenantBookTest, WhatAnEmptyAccountHasNoRoomForIsRefusedBeforeTheCountOfSequences) {
  TenantBook book;
  book.SetLimits("acme", TenantLimits{.host_bytes = 100, .sequences = 1});
  ASSERT_TRUE(book.TryHold("acme", {.host_bytes = 10, .sequences = 1}).ok());
  EXPECT_EQ(TenantShortageOf(book.TryHold("acme", {.host_bytes = 101, .sequences = 1}))->what,
            "host_bytes");
  EXPECT_EQ(TenantShortageOf(book.TryHold("acme", {.host_bytes = 100, .sequences = 1}))->what,
            "sequences");
}

TEST(TenantBookTest, TheDefaultHoldsForWhoeverHasNoQuotaAndZeroIsNone) {
  TenantBook book;
  EXPECT_TRUE(book.TryHold("a", {.host_bytes = int64_t{1} << 60}).ok());
  book.SetDefaults({.sequences = 1});
  ASSERT_TRUE(book.TryHold("b", {.sequences = 1}).ok());
  EXPECT_FALSE(book.TryHold("b", {.sequences = 1}).ok());
  book.SetLimits("b", TenantLimits{});
  EXPECT_TRUE(book.TryHold("b", {.sequences = 1}).ok());
  book.SetLimits("b", std::nullopt);
  EXPECT_FALSE(book.TryHold("b", {.sequences = 1}).ok());
}

TEST(TenantBookTest, TenantsWithNothingAreForgotten) {
  TenantBook book;
  ASSERT_TRUE(book.TryHold("a/b", {.host_bytes = 5}).ok());
  EXPECT_EQ(book.List().size(), 1u);
  book.Change("a/b", {.host_bytes = -5});
  EXPECT_EQ(book.List().size(), 0u);
  book.SetDefaults({.host_bytes = 1});
  const absl::Status refused = book.TryHold("a/b", {.host_bytes = 5});
  EXPECT_EQ(TenantShortageOf(refused)->tenant, "a/b") << "whatever its name is";
  EXPECT_EQ(book.List().size(), 0u);
}

class TenantQuotaTest : public OrderedStoreFixture {
 protected:
  absl::Status OpenFor(SequenceId sequence, const std::string& tenant, int64_t prompt_tokens = 0) {
    return store_->Open({.sequence = sequence,
                         .fingerprint = kFingerprint,
                         .geometry = kTestGeometry,
                         .max_tokens = 1000,
                         .prompt_tokens = prompt_tokens,
                         .tenant = tenant});
  }
  absl::Status Reserve(SequenceId sequence, int64_t pages) {
    return store_->Reserve({.sequence = sequence, .heads = {0, 2}, .num_pages = pages}, false)
        .status();
  }
  // `pages` of every layer and head (4 of those), finished.
  void Fill(SequenceId sequence, const std::string& tenant, int64_t pages) {
    ASSERT_TRUE(OpenFor(sequence, tenant).ok());
    ASSERT_TRUE(Reserve(sequence, pages).ok());
    for (int layer = 0; layer < 2; ++layer) {
      for (int head = 0; head < 2; ++head) {
        for (int64_t page = 0; page < pages; ++page) {
          const RowRange rows = {sequence, layer, head, page * 16, 16};
          ASSERT_TRUE(store_->Write(0, rows, TestRows(rows)).ok());
        }
      }
    }
    ASSERT_TRUE(store_->Commit(sequence, 0, pages * 16).ok());
    store_->StopWriter(sequence, 0);
  }
  TenantUse Used(const std::string& tenant) { return store_->tenants().Find(tenant).used; }
  void Limit(const std::string& tenant, const TenantLimits& limits) {
    store_->tenants().SetLimits(tenant, limits);
  }
  int64_t PagesOf(int64_t bytes) { return bytes / kTestPageBytes; }
};

TEST_F(TenantQuotaTest, AdmissionCountsThePromptAndRefusesBeforeOthersMakeRoom) {
  Make(100);
  Limit("acme", {.host_bytes = 8 * kTestPageBytes});
  ASSERT_TRUE(OpenFor(1, "acme", 16).ok());  // 4 pages
  EXPECT_EQ(PagesOf(Used("acme").host_bytes), 4) << "promised";
  const absl::Status refused = OpenFor(2, "acme", 32);
  ASSERT_TRUE(TenantShortageOf(refused).has_value()) << refused;
  EXPECT_TRUE(OpenFor(2, "other", 32).ok()) << "the tier has room";
  ASSERT_TRUE(Reserve(1, 1).ok());
  EXPECT_EQ(PagesOf(Used("acme").host_bytes), 4) << "what was promised is taken, not more";
  ASSERT_TRUE(store_->Release(1).ok());
  EXPECT_EQ(Used("acme").host_bytes, 0);
  EXPECT_EQ(Used("acme").sequences, 0);
}

TEST_F(TenantQuotaTest, MidSequenceAReservationBeyondItIsRefusedAndChangesNothing) {
  Make(100);
  Limit("acme", {.host_bytes = 8 * kTestPageBytes});
  ASSERT_TRUE(OpenFor(1, "acme").ok());
  ASSERT_TRUE(Reserve(1, 2).ok());
  const absl::Status refused = Reserve(1, 3);
  ASSERT_TRUE(TenantShortageOf(refused).has_value()) << refused;
  EXPECT_EQ(ShortageOf(refused)->need, 4 * kTestPageBytes);
  EXPECT_EQ(PagesOf(Used("acme").host_bytes), 8);
  EXPECT_TRUE(Reserve(1, 2).ok()) << "what it has it gets again";
  ASSERT_TRUE(OpenFor(2, "other").ok());
  EXPECT_TRUE(Reserve(2, 3).ok());
}

TEST_F(TenantQuotaTest, AFullSlabLeavesTheAccountAsItWas) {
  Make(10);
  ASSERT_TRUE(OpenFor(1, "acme").ok());
  EXPECT_FALSE(Reserve(1, 3).ok());
  EXPECT_EQ(Used("acme").host_bytes, 0);
  EXPECT_FALSE(OpenFor(2, "acme", 160).ok());
  EXPECT_EQ(Used("acme").host_bytes, 0);
  EXPECT_EQ(Used("acme").sequences, 1);
}

TEST_F(TenantQuotaTest, RoomInAQuotaIsMadeOfTheTenantsOwnPagesOnly) {
  Make(100);
  Fill(1, "other", 2);
  Fill(2, "acme", 2);
  Limit("acme", {.host_bytes = 8 * kTestPageBytes});
  ASSERT_TRUE(OpenFor(3, "acme").ok());
  const absl::Status refused = Reserve(3, 1);
  ASSERT_TRUE(TenantShortageOf(refused).has_value());
  ASSERT_TRUE(store_->MakeRoom(refused).ok());
  EXPECT_TRUE(Reserve(3, 1).ok());
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes) << "another tenant's, and the longest unused";
  EXPECT_EQ(store_->HostBytes(2), 4 * kTestPageBytes);
  EXPECT_EQ(PagesOf(Used("acme").host_bytes), 8);
  EXPECT_EQ(PagesOf(Used("acme").lower_bytes), 4);
}

TEST_F(TenantQuotaTest, PagesThatComeUpAreCountedAndWantRoomInTheQuota) {
  Make(100);
  Fill(1, "acme", 2);
  Fill(2, "acme", 2);
  while (store_->FlushBatch(1) > 0) {
  }
  EXPECT_EQ(PagesOf(Used("acme").lower_bytes), 8);
  Limit("acme", {.host_bytes = 8 * kTestPageBytes, .lower_bytes = 8 * kTestPageBytes});
  EXPECT_FALSE(store_->BringUp(1).ok()) << "no room beside 2, which may not go down";
  EXPECT_TRUE(ReadPage(1, 0).ok()) << "it is read where it lies";
  EXPECT_EQ(PagesOf(Used("acme").host_bytes), 8);
  Limit("acme", {.host_bytes = 8 * kTestPageBytes});
  ASSERT_TRUE(store_->BringUp(1).ok());
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes);
  EXPECT_EQ(store_->HostBytes(2), 0);
  ExpectAllRows(2, 32);
}

TEST_F(TenantQuotaTest, NothingGoesDownBeyondTheQuotaBelow) {
  Make(20);
  Limit("acme", {.lower_bytes = 2 * kTestPageBytes});
  Fill(1, "acme", 4);  // 17 of 20 pages
  while (store_->FlushBatch(0) > 0) {
  }
  EXPECT_EQ(PagesOf(Used("acme").lower_bytes), 2);
  EXPECT_EQ(store_->HostBytes(1), 14 * kTestPageBytes);
  Limit("acme", {});
  while (store_->FlushBatch(0) > 0) {
  }
  EXPECT_EQ(store_->HostBytes(1), 0);
}

TEST_F(TenantQuotaTest, PinnedPagesStayInTheirTier) {
  Make(20);
  Fill(1, "acme", 2);
  Fill(2, "acme", 2);  // 18 of 20 pages
  store_->SetPinned(1, true);
  TurnUntilIdle();
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes);
  EXPECT_EQ(store_->HostBytes(2), 0) << "although 1 was unused longer";
  EXPECT_EQ(store_->FlushBatch(1), 0);
  store_->SetPinned(1, false);
  EXPECT_GT(store_->FlushBatch(1), 0);
}

}  // namespace
}  // namespace heavywater
