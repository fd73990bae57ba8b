// The ordered store under random traffic and faults, checked against what was written.
#include <gtest/gtest.h>

#include <atomic>
#include <map>
#include <random>
#include <thread>

#include "cache_service/tier/tier_mover.h"
#include "tests/cache_service/tier/ordered_store_fixture.h"

namespace heavywater {
namespace {

// Seeded: a failure prints its seed. One thread: every interleaving that matters is
// made by what the fakes do in the middle of a move.
class OrderedStoreSimTest : public OrderedStoreFixture,
                            public ::testing::WithParamInterface<uint32_t> {
 protected:
  void Step() {
    switch (random_() % 10) {
      case 0:
      case 1:
        return Begin();
      case 2:
        return Finish();
      case 3:
        return End();
      case 4:
        disk_->SetReachable(random_() % 4 != 0);
        remote_->SetReachable(random_() % 4 != 0);
        return;
      case 5:
        disk_->LimitPuts(random_() % 3 == 0 ? static_cast<int>(random_() % 3) : 1 << 30);
        clock_.Advance(absl::Milliseconds(random_() % 2000));
        return;
      case 6:
      case 7:
        (void)store_->Turn();
        return;
      default:
        Check();
    }
  }

  void Begin() {
    const SequenceId id = ++last_id_;
    const int64_t tokens = 1 + random_() % 48;
    absl::Status written = Write(id, tokens);
    for (int tries = 0; absl::IsResourceExhausted(written) && tries < 3; ++tries) {
      (void)store_->Release(id);
      if (!store_->MakeRoom(written).ok()) return;
      written = Write(id, tokens);
    }
    if (written.ok()) {
      live_[id] = tokens;
    } else {
      (void)store_->Release(id);
    }
  }
  void Finish() {
    if (live_.empty()) return;
    const auto sequence = std::next(live_.begin(), random_() % live_.size());
    store_->StopWriter(sequence->first, 0);
  }
  void End() {
    if (live_.empty()) return;
    const auto sequence = std::next(live_.begin(), random_() % live_.size());
    EXPECT_TRUE(store_->Release(sequence->first).ok());
    store_->StopWriter(sequence->first, 0);
    live_.erase(sequence);
  }
  // Any page of any sequence: its rows, or a tier that is away.
  void Check() {
    if (live_.empty()) return;
    const auto [id, tokens] = *std::next(live_.begin(), random_() % live_.size());
    const int64_t page = random_() % kTestGeometry.PagesFor(tokens);
    const int64_t rows = std::min<int64_t>(16, tokens - page * 16);
    const absl::Status read = ReadPage(id, page, random_() % 2, random_() % 2, rows);
    EXPECT_TRUE(read.ok() || absl::IsUnavailable(read)) << read;
  }

  std::mt19937 random_{GetParam()};
  SequenceId last_id_ = 0;
  std::map<SequenceId, int64_t> live_;  // tokens written
};

TEST_P(OrderedStoreSimTest, NoPageIsLostOrCountedTwiceWhateverFails) {
  Make(60, /*disk_pages=*/25, /*remote_pages=*/40);
  disk_->OnPut([this] {
    if (random_() % 4 == 0) End();
  });
  disk_->OnGet([this] {
    if (random_() % 8 == 0) clock_.Advance(absl::Seconds(1));
  });
  for (int step = 0; step < 1500; ++step) {
    Step();
    ExpectBalanced();
    if (HasFailure()) break;
  }
  disk_->SetReachable(true);
  remote_->SetReachable(true);
  disk_->LimitPuts(1 << 30);
  for (const auto& [id, tokens] : live_) ExpectAllRows(id, tokens);
  EXPECT_GT(store_->Stats().moved_down, 0);
  while (!live_.empty()) End();
  clock_.Advance(absl::Seconds(10));
  TurnUntilIdle();
  EXPECT_EQ(store_->Stats().used_bytes, 0);
  EXPECT_EQ(Disk().used_bytes, 0);
  EXPECT_EQ(Remote().used_bytes, 0);
  if (HasFailure()) ADD_FAILURE() << "seed " << GetParam();
}

INSTANTIATE_TEST_SUITE_P(Seeds, OrderedStoreSimTest, ::testing::Range(1u, 41u));

using OrderedStoreThreadsTest = OrderedStoreFixture;

TEST_F(OrderedStoreThreadsTest, ReadersGetTheirRowsWhilePagesMoveUpAndDown) {
  Make(24, /*disk_pages=*/16);
  std::atomic<bool> stop = false;
  std::atomic<SequenceId> newest = 0;
  std::atomic<int64_t> good = 0;
  std::atomic<int64_t> bad = 0;
  const auto read_forever = [&](uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<std::byte> bytes(16 * 256);
    while (!stop) {
      const SequenceId last = newest;
      if (last == 0) continue;
      // The newest three are all there, unless they have just been replaced.
      const RowRange rows = {last - random() % std::min<SequenceId>(last, 3),
                             static_cast<int>(random() % 2), static_cast<int>(random() % 2),
                             static_cast<int64_t>(random() % 2 * 16), 16};
      const absl::Status read = store_->Read(rows, bytes);
      if (read.ok() && bytes == TestRows(rows)) {
        ++good;
      } else if (read.ok() || !absl::IsNotFound(read) || newest < last + 2) {
        ++bad;
      }
    }
  };
  {
    TierMover mover(*store_, absl::Milliseconds(1));
    std::thread first(read_forever, 1);
    std::thread second(read_forever, 2);
    for (SequenceId sequence = 1; sequence <= 150; ++sequence) {
      absl::Status written = Write(sequence, 32);
      while (absl::IsResourceExhausted(written)) {
        (void)store_->Release(sequence);
        clock_.Advance(absl::Seconds(2));
        (void)store_->MakeRoom(written);
        written = Write(sequence, 32);
      }
      ASSERT_TRUE(written.ok()) << written;
      store_->StopWriter(sequence, 0);
      newest = sequence;
      const bool oldest_goes = sequence > 6;
      ASSERT_TRUE(!oldest_goes || store_->Release(sequence - 6).ok());
      if (sequence % 10 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    }
    stop = true;
    first.join();
    second.join();
  }
  EXPECT_EQ(bad, 0);
  EXPECT_GT(good, 0);
  EXPECT_GT(Disk().hits, 0);
  EXPECT_GT(store_->Stats().moved_up, 0);
  for (SequenceId sequence = 145; sequence <= 150; ++sequence) ExpectAllRows(sequence, 32);
  for (SequenceId sequence = 145; sequence <= 150; ++sequence) {
    EXPECT_TRUE(store_->Release(sequence).ok());
  }
  TurnUntilIdle();
  EXPECT_EQ(store_->Stats().used_bytes, 0);
  EXPECT_EQ(Disk().used_bytes, 0);
  EXPECT_EQ(Remote().used_bytes, 0);
}

}  // namespace
}  // namespace heavywater
