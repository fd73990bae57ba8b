// The host tier goes on from its records, over the same shared memory.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/tier/host_page_store.h"
#include "cache_service/tier/ordered_page_store.h"
#include "cache_service/tier/stale_slabs.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/tier/fake_tier.h"
#include "tests/cache_service/tier/memory_state.h"
#include "tests/cache_service/tier/page_store_conformance.h"

namespace heavywater {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kPages = 60;
constexpr int kLayers = 2;
constexpr int kHeads = 2;
constexpr int64_t kPageTokens = 16;

class HostPageStoreRestartTest : public ::testing::Test {
 protected:
  HostPageStoreRestartTest() {
    static int count = 0;
    name_ = absl::StrCat("heavywater-restart-test-", getpid(), "-", ++count);
    auto slab = Slab::Create(name_, kPages * kTestPageBytes);
    EXPECT_TRUE(slab.ok()) << slab.status();
    (*slab)->Keep();
    nonce_ = (*slab)->nonce();
    object_bytes_ = (*slab)->object_bytes();
    store_ = std::make_unique<HostPageStore>(*std::move(slab), &state_);
  }
  ~HostPageStoreRestartTest() override {
    store_.reset();
    RemoveStaleSlab(name_);
  }

  absl::StatusOr<HostPageStore::Restored> Restart() {
    store_.reset();
    auto slab = Slab::Adopt(name_, object_bytes_, nonce_);
    if (!slab.ok()) return slab.status();
    (*slab)->Keep();
    store_ = std::make_unique<HostPageStore>(*std::move(slab), &state_);
    return store_->Restore();
  }
  absl::Status Open(SequenceId id, int64_t prompt_tokens = 0, int num_ranks = 1) {
    return store_->Open({.sequence = id,
                         .fingerprint = id,
                         .geometry = kTestGeometry,
                         .num_ranks = num_ranks,
                         .max_tokens = 1000,
                         .prompt_tokens = prompt_tokens});
  }
  absl::Status Reserve(SequenceId id, int64_t first, int64_t count, bool direct = false) {
    return store_
        ->Reserve({.sequence = id, .heads = {0, kHeads}, .first_page = first, .num_pages = count},
                  direct)
        .status();
  }
  // What a rank does: all rows of one position in all layers and heads.
  absl::Status WriteTokens(SequenceId id, int64_t begin, int64_t end) {
    for (int64_t position = begin; position < end; ++position) {
      for (int layer = 0; layer < kLayers; ++layer) {
        for (int head = 0; head < kHeads; ++head) {
          const RowRange rows = {id, layer, head, position, 1};
          const absl::Status written = store_->Write(0, rows, TestRows(rows));
          if (!written.ok()) return written;
        }
      }
    }
    return store_->Commit(id, 0, end);
  }
  absl::StatusOr<std::vector<std::byte>> Read(const RowRange& rows) {
    std::vector<std::byte> bytes(rows.num_positions * kTestGeometry.row_bytes);
    const absl::Status status = store_->Read(rows, bytes);
    if (!status.ok()) return status;
    return bytes;
  }
  void ExpectReads(SequenceId id, int64_t tokens) {
    for (int64_t position = 0; position < tokens; ++position) {
      const RowRange rows = {id, 1, 0, position, 1};
      const auto bytes = Read(rows);
      ASSERT_TRUE(bytes.ok()) << bytes.status();
      ASSERT_EQ(*bytes, TestRows(rows)) << id << " at " << position;
    }
  }

  std::string name_;
  uint64_t nonce_ = 0;
  int64_t object_bytes_ = 0;
  MemoryState state_;
  std::unique_ptr<HostPageStore> store_;
};

TEST_F(HostPageStoreRestartTest, RowsPromisesAndRoomAreThoseOfBefore) {
  ASSERT_TRUE(Open(1, /*prompt_tokens=*/40).ok());
  ASSERT_TRUE(Reserve(1, 0, 2).ok());
  ASSERT_TRUE(WriteTokens(1, 0, 20).ok());
  const PageStoreStats before = store_->Stats();
  const auto restored = Restart();
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_THAT(restored->live, ElementsAre(1));
  const PageStoreStats after = store_->Stats();
  EXPECT_EQ(after.used_bytes, before.used_bytes);
  EXPECT_EQ(after.promised_bytes, before.promised_bytes);
  EXPECT_GT(after.promised_bytes, 0);
  EXPECT_EQ(after.pages, before.pages);
  EXPECT_EQ(store_->Watermark(1, 0), 20);
  ExpectReads(1, 20);
  EXPECT_EQ(Read({1, 0, 0, 20, 1}).status().code(), absl::StatusCode::kOutOfRange);
  // And goes on where it was.
  ASSERT_TRUE(WriteTokens(1, 20, 32).ok());
  ExpectReads(1, 32);
  ASSERT_TRUE(store_->Release(1).ok());
  EXPECT_EQ(store_->Stats().used_bytes, 0);
  EXPECT_TRUE(state_.Records().empty()) << "an ended sequence leaves records behind";
}

// As version 1 of the state wrote them: a rank of -1 over all bits above it, and nothing of
// contested pages.
TEST_F(HostPageStoreRestartTest, RecordsOfTheFirstVersionOfTheStateAreRead) {
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Reserve(1, 0, 2).ok());
  ASSERT_TRUE(WriteTokens(1, 0, 20).ok());
  ASSERT_EQ(*store_->PrepareShare(1, 16, /*exact=*/true), 16);
  ASSERT_EQ(*store_->OpenFrom({.sequence = 2,
                               .fingerprint = 1,
                               .geometry = kTestGeometry,
                               .num_ranks = 1,
                               .max_tokens = 1000},
                              {.sequence = 1, .tokens = 16}),
            16);
  int of_nobody = 0;
  for (const auto& [key, value] : state_.Records()) {
    const auto kind = static_cast<StateKind>(key[0]);
    RecordReader reader(value);
    RecordWriter writer;
    if (kind == StateKind::kPage) {
      for (int i = 0; i < 2; ++i) writer.Add(reader.Next());  // its place, its sums
      const int64_t flags = reader.Next();
      const int64_t rank = static_cast<int16_t>(flags >> 16);
      writer.Add((flags & 0xffff) | rank * (1 << 16));
      if (rank < 0) ++of_nobody;
    } else if (kind == StateKind::kPages) {
      for (int i = 0; i < 11; ++i) writer.Add(reader.Next());  // sizes, where its watermarks are
      const int64_t ranks = reader.Next();
      writer.Add(ranks);
      for (int64_t i = 0; i < ranks * 3; ++i) writer.Add(reader.Next());  // heads
      for (int set = 0; set < 3; ++set) {
        const int64_t size = reader.Next();
        writer.Add(size);
        for (int64_t i = 0; i < size; ++i) writer.Add(reader.Next());
      }
      for (const int64_t value : {0, 5, 6}) writer.Add(value);  // page 5 was given up
    } else {
      continue;
    }
    ASSERT_TRUE(reader.Finish().ok()) << "it has more than version 1 had";
    state_.Set(key, writer.Take());
  }
  ASSERT_EQ(of_nobody, 4);
  const PageStoreStats before = store_->Stats();
  const auto restored = Restart();
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(store_->Stats().used_bytes, before.used_bytes);
  EXPECT_EQ(store_->Stats().pages, before.pages);
  EXPECT_EQ(store_->Stats().retiring_bytes, 0);
  ExpectReads(1, 20);
  EXPECT_EQ(Reserve(1, 5, 1).code(), absl::StatusCode::kFailedPrecondition);
  // Nothing is contested: the ranks of both go on in the pages that they have.
  ASSERT_TRUE(Reserve(1, 0, 2).ok());
  ASSERT_TRUE(Reserve(2, 0, 1).ok());
  EXPECT_EQ(store_->Stats().pages, before.pages);
}

TEST_F(HostPageStoreRestartTest, PagesThatRestDoSoAfterARestartToo) {
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Reserve(1, 0, 2).ok());
  ASSERT_TRUE(WriteTokens(1, 0, 2 * kPageTokens).ok());
  const std::vector<PageId> pages = {{0, 0, 0}, {1, 1, 0}, {1, 1, 1}};
  ASSERT_TRUE(store_->Rest(1, 0, pages).ok());
  ASSERT_TRUE(store_->Ask(1, 0, {{{0, 0, 0}}})->at(0).ok());
  ASSERT_TRUE(Restart().ok());
  EXPECT_EQ(store_->Stats().resting_pages, 2);
  EXPECT_EQ(store_->MovableBytes(), 2 * kTestPageBytes);
  EXPECT_TRUE(store_->Ask(1, 0, {{{1, 1, 1}}})->at(0).ok());
  EXPECT_EQ(store_->MovableBytes(), kTestPageBytes);
  ExpectReads(1, 2 * kPageTokens);
}

TEST_F(HostPageStoreRestartTest, ADamagedPageIsFoundByItsSealOfBefore) {
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Reserve(1, 0, 1).ok());
  ASSERT_TRUE(WriteTokens(1, 0, kPageTokens).ok());
  ASSERT_TRUE(Restart().ok());
  const auto reservation =
      store_->Reserve({.sequence = 1, .heads = {0, kHeads}, .num_pages = 1}, false);
  ASSERT_TRUE(reservation.ok());
  *store_->slab().At(reservation->offsets[0]) ^= std::byte{1};
  EXPECT_EQ(Read({1, 0, 0, 0, 1}).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(HostPageStoreRestartTest, PagesOfAnEndedSequenceStayUntilItsWriterHasStopped) {
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Reserve(1, 0, 1, /*direct=*/true).ok());
  ASSERT_TRUE(store_->Release(1).ok());
  const auto restored = Restart();
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_THAT(restored->retiring, ElementsAre(1));
  EXPECT_GT(store_->Stats().retiring_bytes, 0);
  EXPECT_EQ(Open(1).code(), absl::StatusCode::kAlreadyExists);
  store_->StopWriter(1, 0);
  EXPECT_EQ(store_->Stats().used_bytes, 0);
}

// Its prompt's pages were given up on: what was held for them goes to others.
TEST_F(HostPageStoreRestartTest, APromiseThatHasEndedDoesNotComeBack) {
  ASSERT_TRUE(Open(1, /*prompt_tokens=*/200).ok());
  ASSERT_TRUE(Reserve(1, 0, 1).ok());
  store_->StopWriter(1, 0);
  EXPECT_EQ(store_->Stats().promised_bytes, 0);
  ASSERT_TRUE(Open(2, /*prompt_tokens=*/200).ok());
  const int64_t promised = store_->Stats().promised_bytes;
  const auto restored = Restart();
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(store_->Stats().promised_bytes, promised);
}

TEST_F(HostPageStoreRestartTest, PromisesBeyondWhatIsFreeAreCut) {
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Open(2, /*prompt_tokens=*/100).ok());
  ASSERT_TRUE(Reserve(1, 0, 2).ok());
  ASSERT_TRUE(WriteTokens(1, 0, 20).ok());
  const std::string key = StateKey(StateKind::kPages, 2);
  constexpr int kPromiseField = 10;
  const std::string old = state_.Records().at(key);
  RecordReader fields(old);
  RecordWriter writer;
  for (int field = 0; !fields.Finish().ok(); ++field) {
    const int64_t value = fields.Next();
    writer.Add(field == kPromiseField ? 2 * kPages * kTestPageBytes : value);
  }
  state_.Set(key, writer.Take());
  const auto restored = Restart();
  ASSERT_TRUE(restored.ok()) << restored.status();
  const PageStoreStats stats = store_->Stats();
  EXPECT_EQ(stats.promised_bytes, stats.free_bytes);
  ExpectReads(1, 20);
}

TEST_F(HostPageStoreRestartTest, RecordsThatDoNotFitAreRefused) {
  ASSERT_TRUE(Open(1).ok());
  ASSERT_TRUE(Open(2).ok());
  ASSERT_TRUE(Reserve(1, 0, 1).ok());
  const auto good = state_.Records();
  const std::string first = StateKey(StateKind::kPage, 1, 0);
  const std::string page = good.at(first);
  // The same place twice; a damaged byte; a page without its sequence.
  for (const auto& [key, value] : std::map<std::string, std::string>{
           {StateKey(StateKind::kPage, 2, 0), page},
           {first, std::string(1, static_cast<char>(page[0] ^ 1)) + page.substr(1)},
           {StateKey(StateKind::kPage, 3, 0), page}}) {
    for (const auto& [old_key, old_value] : good) state_.Set(old_key, old_value);
    state_.Set(key, value);
    EXPECT_EQ(Restart().status().code(), absl::StatusCode::kDataLoss);
    StateBatch undo;
    undo.Delete(key);
    state_.Apply(undo);
  }
  for (const auto& [key, value] : good) state_.Set(key, value);
  EXPECT_TRUE(Restart().ok());
}

TEST_F(HostPageStoreRestartTest, PagesInATierBelowAreFoundThere) {
  FakeClock clock;
  auto tier = std::make_unique<FakeTier>("below", 1 << 20);
  FakeTier* below = tier.get();
  std::vector<std::unique_ptr<LowerTier>> tiers;
  tiers.push_back(std::move(tier));
  auto ordered = std::make_unique<OrderedPageStore>(std::move(store_), std::move(tiers),
                                                    OrderedStoreOptions(), clock);
  const RowRange rows = {1, 1, 1, 3, 1};
  ASSERT_TRUE(ordered->Open({.sequence = 1, .geometry = kTestGeometry, .max_tokens = 100}).ok());
  ASSERT_TRUE(ordered->Reserve({.sequence = 1, .heads = {0, kHeads}, .num_pages = 1}, false).ok());
  for (int layer = 0; layer < kLayers; ++layer) {
    for (int head = 0; head < kHeads; ++head) {
      const RowRange all = {1, layer, head, 0, kPageTokens};
      ASSERT_TRUE(ordered->Write(0, all, TestRows(all)).ok());
    }
  }
  ASSERT_TRUE(ordered->Commit(1, 0, kPageTokens).ok());
  ordered->StopWriter(1, 0);
  ASSERT_TRUE(ordered->MakeRoom(absl::ResourceExhaustedError("full")).ok());
  ASSERT_TRUE(below->Holds({.sequence = 1, .layer = 1, .kv_head = 1}));
  std::vector<std::byte> stored(kTestPageBytes);
  const auto crc = below->Get({.sequence = 1, .layer = 1, .kv_head = 1}, stored);
  ASSERT_TRUE(crc.ok());
  const uint32_t seal = *crc;
  ordered.reset();
  const auto restored = Restart();
  ASSERT_TRUE(restored.ok()) << restored.status();
  EXPECT_EQ(restored->below.size(), size_t{kLayers * kHeads});
  EXPECT_EQ(store_->TierOf(rows), 1);
  std::vector<std::byte> bytes(256);
  const auto place = store_->ReadOrLocate(rows, bytes);
  ASSERT_TRUE(place.ok()) << place.status();
  EXPECT_EQ((*place)->crc32c, seal) << "the seal that tells a stale copy";
}

TEST_F(HostPageStoreRestartTest, AnotherSlabOfTheSameNameIsNotTakenOver) {
  EXPECT_EQ(Slab::Adopt(name_, object_bytes_, nonce_).status().code(),
            absl::StatusCode::kUnavailable)
      << "it has an owner";
  store_.reset();
  EXPECT_EQ(Slab::Adopt(name_, object_bytes_, nonce_ + 1).status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_EQ(Slab::Adopt(name_, object_bytes_ + kSlabUnitBytes, nonce_).status().code(),
            absl::StatusCode::kDataLoss);
  EXPECT_TRUE(Slab::Adopt(name_, object_bytes_, nonce_).ok()) << "the refusal removed it";
}

// Any history, cut anywhere: what was answered for is there.
TEST_F(HostPageStoreRestartTest, RandomHistoriesSurviveRestartsAtAnyPoint) {
  std::mt19937 random(7);
  const auto draw = [&](int limit) { return static_cast<int>(random() % limit); };
  std::map<SequenceId, std::pair<int64_t, int64_t>> tokens;  // written, reserved pages
  SequenceId next = 1;
  for (int step = 0; step < 600; ++step) {
    const int what = draw(10);
    if (what == 0) {
      if (Open(next).ok()) tokens[next] = {0, 0};
      ++next;
    } else if (what == 1 && !tokens.empty()) {
      const auto gone = std::next(tokens.begin(), draw(static_cast<int>(tokens.size())));
      ASSERT_TRUE(store_->Release(gone->first).ok());
      tokens.erase(gone);
    } else if (what == 2) {
      const PageStoreStats before = store_->Stats();
      const auto restored = Restart();
      ASSERT_TRUE(restored.ok()) << restored.status();
      ASSERT_EQ(restored->live.size(), tokens.size());
      const PageStoreStats after = store_->Stats();
      ASSERT_EQ(after.used_bytes, before.used_bytes);
      ASSERT_EQ(after.pages, before.pages);
      for (const auto& [id, held] : tokens) ExpectReads(id, held.first);
    } else if (!tokens.empty()) {
      const auto one = std::next(tokens.begin(), draw(static_cast<int>(tokens.size())));
      auto& [written, pages] = one->second;
      if (Reserve(one->first, pages, 1).ok()) ++pages;
      const int64_t end = std::min<int64_t>(written + draw(20), pages * kPageTokens);
      ASSERT_TRUE(WriteTokens(one->first, written, end).ok());
      written = std::max(written, end);
    }
    const PageStoreStats stats = store_->Stats();
    ASSERT_EQ(stats.free_bytes + stats.used_bytes, stats.total_bytes);
  }
  for (const auto& [id, held] : tokens) ASSERT_TRUE(store_->Release(id).ok());
  EXPECT_EQ(store_->Stats().used_bytes, 0);
  EXPECT_TRUE(state_.Records().empty());
}

}  // namespace
}  // namespace heavywater
