// Pages that rest: they leave the slab while their sequence goes on, and come back when
// they are asked for.
#include <gmock/gmock.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "cache_service/tier/tier_mover.h"
#include "tests/cache_service/tier/ordered_store_fixture.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

class RestingPagesTest : public OrderedStoreFixture {
 protected:
  // All layers and heads of pages [0, num_pages).
  static std::vector<PageId> Pages(int64_t num_pages) {
    std::vector<PageId> pages;
    for (int64_t page = 0; page < num_pages; ++page) {
      for (int layer = 0; layer < 2; ++layer) {
        for (int head = 0; head < 2; ++head) pages.push_back({layer, head, page});
      }
    }
    return pages;
  }
  absl::Status Ask(SequenceId sequence, const PageId& page) {
    const auto asked = store_->Ask(sequence, 0, {&page, 1});
    if (!asked.ok()) return asked.status();
    return asked->at(0).status();
  }
  bool LiesInTheSlab(SequenceId sequence, const PageId& page) {
    return store_->LowestTierOf(sequence, {&page, 1}) == kHostTier;
  }
  // What a rank that maps the slab reads there.
  void ExpectInPlace(SequenceId sequence, const PageId& page, int64_t offset) {
    const RowRange rows = {sequence, page.layer, page.kv_head, page.page * 16, 16};
    const std::vector<std::byte> want = TestRows(rows);
    EXPECT_TRUE(std::equal(want.begin(), want.end(), store_->slab().At(offset)));
  }
};

TEST_F(RestingPagesTest, TheyGoDownWhileTheirSequenceGoesOnAndComeBackWhenAskedFor) {
  Make(20);
  ASSERT_TRUE(Write(1, 32).ok());
  ASSERT_TRUE(Write(2, 32).ok());  // 18 of 20 pages
  ASSERT_TRUE(store_->Rest(1, 0, Pages(2)).ok());
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes) << "nothing wants their room yet";
  EXPECT_EQ(store_->Stats().resting_pages, 8);
  clock_.Advance(absl::Seconds(1));
  TurnUntilIdle();
  EXPECT_EQ(store_->HostBytes(1), 0);
  EXPECT_EQ(store_->HostBytes(2), 8 * kTestPageBytes);
  EXPECT_EQ(Disk().pages, 8);
  const std::vector<PageId> pages = Pages(2);
  const auto offsets = store_->Ask(1, 0, pages);
  ASSERT_TRUE(offsets.ok()) << offsets.status();
  for (size_t i = 0; i < pages.size(); ++i) {
    ASSERT_TRUE(offsets->at(i).ok()) << offsets->at(i).status();
    ExpectInPlace(1, pages[i], *offsets->at(i));
  }
  EXPECT_EQ(Disk().pages, 0);
  EXPECT_EQ(store_->Stats().resting_pages, 0);
  TurnUntilIdle();
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes) << "they stay: above the high watermark";
  const auto again = store_->Ask(1, 0, pages);
  for (size_t i = 0; i < pages.size(); ++i) EXPECT_EQ(*again->at(i), *offsets->at(i));
}

TEST_F(RestingPagesTest, OnlyPagesThatAreWrittenAsAWholeByTheRankRest) {
  Make(40);
  ASSERT_TRUE(Write(1, 24).ok());  // the second page is half full
  absl::Status status = store_->Rest(1, 0, Pages(2));
  EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("page 1, layer 0, kv_head 0 ends at 32"));
  EXPECT_EQ(store_->Stats().resting_pages, 0) << "all or nothing";
  EXPECT_TRUE(store_->Rest(1, 0, Pages(1)).ok());
  EXPECT_TRUE(store_->Rest(1, 0, Pages(1)).ok()) << "a replay";
  EXPECT_EQ(store_->Stats().resting_pages, 4);
  for (const PageId page :
       {PageId{2, 0, 0}, PageId{0, -1, 0}, PageId{0, 0, 62}, PageId{0, 0, -1}}) {
    EXPECT_TRUE(absl::IsNotFound(store_->Rest(1, 0, {&page, 1})));
    EXPECT_TRUE(absl::IsNotFound(Ask(1, page)));
  }
  EXPECT_TRUE(absl::IsNotFound(store_->Rest(2, 0, Pages(1))));
  EXPECT_TRUE(absl::IsFailedPrecondition(store_->Rest(1, 1, Pages(1)))) << "another rank's";
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Rest(1, 0, std::vector<PageId>(1025))));
  EXPECT_TRUE(absl::IsInvalidArgument(store_->Ask(1, 0, std::vector<PageId>(1025)).status()));
}

TEST_F(RestingPagesTest, APageThatIsAskedForWhileItMovesStays) {
  Make(20);
  ASSERT_TRUE(Write(1, 32).ok());
  ASSERT_TRUE(Write(2, 32).ok());
  ASSERT_TRUE(store_->Rest(1, 0, Pages(1)).ok());
  int64_t offset = -1;
  disk_->OnPut([&] { offset = *store_->Ask(1, 0, {{{0, 1, 0}}})->at(0); });
  store_->Turn();
  disk_->OnPut(nullptr);
  ExpectInPlace(1, {0, 1, 0}, offset);
  EXPECT_EQ(store_->HostBytes(1), 5 * kTestPageBytes);
  EXPECT_FALSE(disk_->Holds(Key(1, 0, 0, 1)));
  EXPECT_EQ(*store_->Ask(1, 0, {{{0, 1, 0}}})->at(0), offset);
  ExpectBalanced();
}

TEST_F(RestingPagesTest, AReservationOfThemBringsThemUpAndTheyRestNoMore) {
  Make(20);
  ASSERT_TRUE(Write(1, 32).ok());
  ASSERT_TRUE(Write(2, 32).ok());
  ASSERT_TRUE(store_->Rest(1, 0, Pages(2)).ok());
  TurnUntilIdle();
  ASSERT_LT(store_->HostBytes(1), 8 * kTestPageBytes);
  const PageRange range = {.sequence = 1, .heads = {0, 2}, .num_pages = 2};
  EXPECT_EQ(store_->LowestTierOf(range), 1);
  const auto reserved = store_->Reserve(range, true);
  ASSERT_TRUE(reserved.ok()) << reserved.status();
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes);
  EXPECT_EQ(store_->Stats().resting_pages, 0);
  EXPECT_EQ(store_->LowestTierOf(range), kHostTier);
  ExpectInPlace(1, {1, 0, 1}, reserved->offsets[5]);
  TurnUntilIdle();
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes);
}

// As a sequence that begins with the same text does (prefix reuse).
TEST_F(RestingPagesTest, PagesThatOthersBringUpGoOnToRestUntilTheirRanksHaveStopped) {
  Make(20);
  ASSERT_TRUE(Write(1, 32).ok());
  ASSERT_TRUE(Write(2, 32).ok());
  ASSERT_TRUE(store_->Rest(1, 0, Pages(2)).ok());
  TurnUntilIdle();
  ASSERT_TRUE(store_->BringUp(1).ok());
  EXPECT_EQ(store_->HostBytes(1), 8 * kTestPageBytes);
  EXPECT_EQ(store_->Stats().resting_pages, 8);
  TurnUntilIdle();
  EXPECT_LT(store_->HostBytes(1), 8 * kTestPageBytes) << "they may leave again";
  store_->StopWriter(1, 0);
  ASSERT_TRUE(store_->BringUp(1).ok());
  EXPECT_EQ(store_->Stats().resting_pages, 0);
}

TEST_F(RestingPagesTest, EachAskedPageEndsByItself) {
  Make(20);
  ASSERT_TRUE(Write(1, 32).ok());
  ASSERT_TRUE(Write(2, 32).ok());
  ASSERT_TRUE(store_->Rest(1, 0, Pages(2)).ok());
  TurnUntilIdle();
  ASSERT_TRUE(disk_->Damage(Key(1, 0)));
  ASSERT_TRUE(disk_->Lose(Key(1, 1)));
  const std::vector<PageId> pages = {{0, 0, 0}, {0, 0, 1}, {1, 1, 1}};
  auto asked = *store_->Ask(1, 0, pages);
  EXPECT_TRUE(absl::IsDataLoss(asked[0].status())) << asked[0].status();
  EXPECT_TRUE(absl::IsNotFound(asked[1].status())) << asked[1].status();
  ASSERT_TRUE(asked[2].ok()) << asked[2].status();
  ExpectInPlace(1, pages[2], *asked[2]);
  EXPECT_EQ(store_->Stats().pages_asked, 3);
  EXPECT_EQ(store_->Stats().pages_lost, 2);
  disk_->SetReachable(false);
  EXPECT_TRUE(absl::IsUnavailable(Ask(1, {1, 0, 0})));
  disk_->SetReachable(true);
  EXPECT_TRUE(Ask(1, {1, 0, 0}).ok());
}

TEST_F(RestingPagesTest, AskedPagesFindRoomWhereOthersRestAndElseSaySo) {
  Make(20);
  ASSERT_TRUE(Write(1, 32).ok());
  ASSERT_TRUE(store_->Rest(1, 0, Pages(2)).ok());
  ASSERT_TRUE(Write(2, 32).ok());
  TurnUntilIdle();
  ASSERT_EQ(store_->HostBytes(1), 0);
  ASSERT_TRUE(Write(3, 32).ok());
  EXPECT_EQ(store_->Stats().free_bytes, kTestPageBytes);
  EXPECT_TRUE(Ask(1, {0, 0, 0}).ok());
  const absl::Status full = Ask(1, {0, 0, 1});
  EXPECT_TRUE(absl::IsResourceExhausted(full)) << full;
  ASSERT_TRUE(store_->Rest(3, 0, Pages(1)).ok());
  EXPECT_TRUE(Ask(1, {0, 0, 1}).ok());
  EXPECT_LT(store_->HostBytes(3), 8 * kTestPageBytes);
  ExpectBalanced();
}

TEST_F(RestingPagesTest, PressureIsWhatIsOverTheLowWatermarkAndCannotLeaveByItself) {
  Make(40);
  ASSERT_TRUE(Write(1, 48).ok());
  ASSERT_TRUE(Write(2, 48).ok());
  EXPECT_EQ(store_->Pressure().shortage_bytes, 0) << "26 of 40 pages";
  ASSERT_TRUE(Write(3, 48).ok());
  clock_.Advance(absl::Seconds(1));
  EXPECT_NEAR(store_->Pressure().shortage_bytes, 19 * kTestPageBytes, 100) << "39 pages, low is 20";
  EXPECT_EQ(store_->Pressure().restable_bytes, 39 * kTestPageBytes);
  ASSERT_TRUE(store_->Rest(1, 0, Pages(2)).ok());
  EXPECT_NEAR(store_->Pressure().shortage_bytes, 19 * kTestPageBytes, 100) << "looked up just now";
  clock_.Advance(absl::Seconds(1));
  EXPECT_NEAR(store_->Pressure().shortage_bytes, 11 * kTestPageBytes, 100);
  store_->StopWriter(2, 0);
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(store_->Pressure().shortage_bytes, 0) << "all of 2 may leave";
}

TEST_F(RestingPagesTest, WhoFoundNoRoomIsPressureForSomeSeconds) {
  Make(40);
  ASSERT_TRUE(Write(1, 96).ok());  // 25 pages
  const absl::Status full = store_->Open({.sequence = 2,
                                          .fingerprint = kFingerprint,
                                          .geometry = kTestGeometry,
                                          .max_tokens = 1000,
                                          .prompt_tokens = 80});  // 21 pages
  ASSERT_TRUE(absl::IsResourceExhausted(full)) << full;
  EXPECT_TRUE(absl::IsResourceExhausted(store_->MakeRoom(full)));
  EXPECT_NEAR(store_->Pressure().shortage_bytes, 6 * kTestPageBytes, 100);
  ASSERT_TRUE(store_->Rest(1, 0, Pages(2)).ok());
  EXPECT_TRUE(store_->MakeRoom(full).ok());
  clock_.Advance(absl::Seconds(6));
  EXPECT_EQ(store_->Pressure().shortage_bytes, 0);
}

TEST_F(RestingPagesTest, WhereNoTierBelowHasRoomThereIsNoPressure) {
  Make(20, /*disk_pages=*/0, /*remote_pages=*/0);
  ASSERT_TRUE(Write(1, 64).ok());
  EXPECT_EQ(store_->Pressure().shortage_bytes, 0);
}

TEST_F(RestingPagesTest, ASequenceThatEndsTakesWhatRestsBelowAlong) {
  Make(20);
  ASSERT_TRUE(Write(1, 32).ok());
  ASSERT_TRUE(Write(2, 32).ok());
  ASSERT_TRUE(store_->Rest(1, 0, Pages(2)).ok());
  TurnUntilIdle();
  ASSERT_GT(Disk().pages, 0);
  EXPECT_TRUE(store_->Release(1).ok());
  store_->StopWriter(1, 0);
  EXPECT_TRUE(absl::IsNotFound(Ask(1, {0, 0, 0})));
  TurnUntilIdle();
  EXPECT_EQ(Disk().used_bytes, 0);
  EXPECT_EQ(store_->Stats().used_bytes, 9 * kTestPageBytes);
}

// Seeded: sequences that go on, rest and ask, among others that finish and end, while tiers
// fail. A model of which pages a rank may read checks their bytes in place, always.
class RestingPagesSimTest : public RestingPagesTest,
                            public ::testing::WithParamInterface<uint32_t> {
 protected:
  struct Sequence {
    int64_t full_pages = 0;
    bool finished = false;
    std::map<PageId, int64_t> in_place;  // offsets
  };

  void Begin() {
    const SequenceId id = ++last_id_;
    const int64_t tokens = 16 + random_() % 60;
    absl::Status written = Write(id, tokens);
    for (int tries = 0; absl::IsResourceExhausted(written) && tries < 3; ++tries) {
      (void)store_->Release(id);
      if (!store_->MakeRoom(written).ok()) return;
      written = Write(id, tokens);
    }
    if (!written.ok()) {
      (void)store_->Release(id);
      return;
    }
    Sequence& sequence = live_[id];
    sequence.full_pages = tokens / 16;
    for (const PageId& page : Pages(sequence.full_pages)) AskOne(id, sequence, page);
  }
  void AskOne(SequenceId id, Sequence& sequence, const PageId& page) {
    const SequenceId busy = std::exchange(busy_, id);
    const auto asked = store_->Ask(id, 0, {&page, 1});
    busy_ = busy;
    ASSERT_TRUE(asked.ok()) << asked.status();
    const absl::StatusOr<int64_t>& offset = asked->at(0);
    if (offset.ok()) {
      sequence.in_place[page] = *offset;
      return;
    }
    EXPECT_TRUE(absl::IsUnavailable(offset.status()) || absl::IsResourceExhausted(offset.status()))
        << offset.status();
  }
  Sequence* Any(SequenceId* id) {
    if (live_.empty()) return nullptr;
    const auto found = std::next(live_.begin(), random_() % live_.size());
    *id = found->first;
    return *id == busy_ ? nullptr : &found->second;
  }
  PageId AnyPage(const Sequence& sequence) {
    return {static_cast<int>(random_() % 2), static_cast<int>(random_() % 2),
            static_cast<int64_t>(random_() % sequence.full_pages)};
  }
  void Rest() {
    SequenceId id = 0;
    Sequence* const sequence = Any(&id);
    if (sequence == nullptr || sequence->finished) return;
    for (int i = 0; i < 4; ++i) {
      const PageId page = AnyPage(*sequence);
      sequence->in_place.erase(page);
      EXPECT_TRUE(store_->Rest(id, 0, {&page, 1}).ok());
    }
  }
  void AskAny(bool in_slab_only) {
    SequenceId id = 0;
    Sequence* const sequence = Any(&id);
    if (sequence == nullptr || sequence->finished) return;
    const PageId page = AnyPage(*sequence);
    if (!in_slab_only || LiesInTheSlab(id, page)) AskOne(id, *sequence, page);
  }
  void End() {
    SequenceId id = 0;
    Sequence* const sequence = Any(&id);
    if (sequence == nullptr) return;
    if (!sequence->finished && random_() % 2 == 0) {
      store_->StopWriter(id, 0);
      sequence->finished = true;
      sequence->in_place.clear();
      return;
    }
    EXPECT_TRUE(store_->Release(id).ok());
    store_->StopWriter(id, 0);
    live_.erase(id);
  }
  void Step() {
    switch (random_() % 12) {
      case 0:
      case 1:
        return Begin();
      case 2:
        return End();
      case 3:
      case 4:
      case 5:
        return Rest();
      case 6:
      case 7:
        return AskAny(/*in_slab_only=*/false);
      case 8:
        disk_->SetReachable(random_() % 4 != 0);
        remote_->SetReachable(random_() % 4 != 0);
        disk_->LimitPuts(random_() % 3 == 0 ? static_cast<int>(random_() % 3) : 1 << 30);
        return;
      case 9:
        clock_.Advance(absl::Milliseconds(random_() % 2000));
        (void)store_->Pressure();
        return;
      default:
        (void)store_->Turn();
    }
  }
  void ExpectAllInPlace() {
    for (const auto& [id, sequence] : live_) {
      for (const auto& [page, offset] : sequence.in_place) ExpectInPlace(id, page, offset);
    }
  }

  std::mt19937 random_{GetParam()};
  SequenceId last_id_ = 0;
  // A rank asks and tells one thing at a time: what happens in the middle happens to others.
  SequenceId busy_ = 0;
  std::map<SequenceId, Sequence> live_;
};

TEST_P(RestingPagesSimTest, WhatARankMayReadLiesWhereItWasToldAndNothingIsLost) {
  Make(60, /*disk_pages=*/35, /*remote_pages=*/60);
  bool within = false;  // of a hook: none in a hook
  const auto meddle = [&] {
    if (std::exchange(within, true)) return;
    // In the middle of a move: what lies below would wait for its end.
    if (random_() % 3 == 0) AskAny(/*in_slab_only=*/true);
    if (random_() % 3 == 0) Rest();
    if (random_() % 8 == 0) End();
    within = false;
  };
  disk_->OnPut(meddle);
  disk_->OnGet(meddle);
  for (int step = 0; step < 1500; ++step) {
    within = false;
    Step();
    ExpectBalanced();
    ExpectAllInPlace();
    if (HasFailure()) break;
  }
  disk_->OnPut(nullptr);
  disk_->OnGet(nullptr);
  disk_->SetReachable(true);
  remote_->SetReachable(true);
  disk_->LimitPuts(1 << 30);
  for (const auto& [id, sequence] : live_) ExpectAllRows(id, sequence.full_pages * 16);
  EXPECT_GT(store_->Stats().moved_down, 0);
  EXPECT_GT(store_->Stats().moved_up, 0);
  while (!live_.empty()) End();
  clock_.Advance(absl::Seconds(10));
  TurnUntilIdle();
  EXPECT_EQ(store_->Stats().used_bytes, 0);
  EXPECT_EQ(store_->Stats().resting_pages, 0);
  EXPECT_EQ(Disk().used_bytes, 0);
  EXPECT_EQ(Remote().used_bytes, 0);
  if (HasFailure()) ADD_FAILURE() << "seed " << GetParam();
}

INSTANTIATE_TEST_SUITE_P(Seeds, RestingPagesSimTest, ::testing::Range(1u, 41u));

// With the mover's thread beside the rank's.
TEST_F(RestingPagesTest, ARankReadsItsOwnBytesWhileTheMoverWorks) {
  Make(40, /*disk_pages=*/200);
  for (SequenceId sequence = 1; sequence <= 3; ++sequence) ASSERT_TRUE(Write(sequence, 48).ok());
  TierMover mover(*store_, absl::Milliseconds(1));
  std::mt19937 random(1);
  std::map<std::pair<SequenceId, PageId>, int64_t> in_place;
  for (int step = 0; step < 4000; ++step) {
    const SequenceId sequence = 1 + random() % 3;
    const PageId page = {static_cast<int>(random() % 2), static_cast<int>(random() % 2),
                         static_cast<int64_t>(random() % 3)};
    if (random() % 2 == 0) {
      in_place.erase({sequence, page});
      ASSERT_TRUE(store_->Rest(sequence, 0, {&page, 1}).ok());
    } else {
      const auto asked = store_->Ask(sequence, 0, {&page, 1});
      ASSERT_TRUE(asked.ok()) << asked.status();
      if (asked->at(0).ok()) in_place[{sequence, page}] = *asked->at(0);
    }
    if (step % 16 != 0) continue;
    for (const auto& [name, offset] : in_place) ExpectInPlace(name.first, name.second, offset);
    if (HasFailure()) return;
  }
  EXPECT_GT(store_->Stats().moved_down, 0);
  EXPECT_GT(store_->Stats().moved_up, 0);
}

}  // namespace
}  // namespace heavywater
