#include "tests/cache_service/tier/ordered_store_fixture.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/tier/stored_page.h"

namespace heavywater {

void OrderedStoreFixture::Make(int host_pages, int disk_pages, int remote_pages) {
  auto disk = std::make_unique<FakeTier>("disk", disk_pages * StoredBytes(kTestPageBytes));
  auto remote = std::make_unique<FakeTier>("remote", remote_pages * StoredBytes(kTestPageBytes));
  disk_ = disk.get();
  remote_ = remote.get();
  std::vector<std::unique_ptr<LowerTier>> below;
  below.push_back(std::move(disk));
  below.push_back(std::move(remote));
  store_ = std::make_unique<OrderedPageStore>(
      std::make_unique<HostPageStore>(*Slab::Create("", host_pages * kTestPageBytes)),
      std::move(below),
      OrderedStoreOptions{.high_percent = 90,
                          .low_percent = 50,
                          .max_move_bytes = 4 * kTestPageBytes,
                          .code_pages = code_pages_,
                          .on_change =
                              [this](const char* tier, const absl::Status& status) {
                                changes_.push_back(absl::StrCat(
                                    tier, " ", absl::StatusCodeToString(status.code())));
                              }},
      clock_);
}

absl::Status OrderedStoreFixture::Write(SequenceId sequence, int64_t tokens,
                                        int64_t reserved_pages) {
  HW_RETURN_IF_ERROR(store_->Open({.sequence = sequence,
                                   .fingerprint = kFingerprint,
                                   .geometry = kTestGeometry,
                                   .max_tokens = 1000}));
  const int64_t pages = std::max(kTestGeometry.PagesFor(tokens), reserved_pages);
  HW_RETURN_IF_ERROR(
      store_->Reserve({.sequence = sequence, .heads = {0, 2}, .num_pages = pages}, false).status());
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      for (int64_t first = 0; first < tokens; first += 16) {
        const RowRange rows = {sequence, layer, head, first, std::min<int64_t>(16, tokens - first)};
        HW_RETURN_IF_ERROR(store_->Write(0, rows, TestRows(rows)));
      }
    }
  }
  return store_->Commit(sequence, 0, tokens);
}

void OrderedStoreFixture::WriteAndFinish(SequenceId sequence, int64_t tokens,
                                         int64_t reserved_pages) {
  const absl::Status written = Write(sequence, tokens, reserved_pages);
  ASSERT_TRUE(written.ok()) << written;
  store_->StopWriter(sequence, 0);
}

void OrderedStoreFixture::TurnUntilIdle() {
  while (store_->Turn()) ExpectBalanced();
}

absl::Status OrderedStoreFixture::ReadPage(SequenceId sequence, int64_t page, int layer,
                                           int kv_head, int64_t rows) {
  const RowRange range = {sequence, layer, kv_head, page * 16, rows};
  std::vector<std::byte> bytes(rows * kTestGeometry.row_bytes);
  HW_RETURN_IF_ERROR(store_->Read(range, bytes));
  EXPECT_EQ(bytes, TestRows(range)) << "sequence " << sequence << " page " << page;
  return absl::OkStatus();
}

void OrderedStoreFixture::ExpectAllRows(SequenceId sequence, int64_t tokens) {
  for (int layer = 0; layer < 2; ++layer) {
    for (int head = 0; head < 2; ++head) {
      for (int64_t page = 0; page * 16 < tokens; ++page) {
        const absl::Status read =
            ReadPage(sequence, page, layer, head, std::min<int64_t>(16, tokens - page * 16));
        EXPECT_TRUE(read.ok()) << read;
      }
    }
  }
}

void OrderedStoreFixture::ExpectBalanced() {
  const PageStoreStats stats = store_->Stats();
  EXPECT_EQ(stats.free_bytes + stats.used_bytes, stats.total_bytes);
  EXPECT_GE(stats.pages, 0);
  for (const TierStats& tier : stats.below) {
    EXPECT_EQ(tier.free_bytes + tier.used_bytes, tier.total_bytes) << tier.tier;
    EXPECT_EQ(tier.used_bytes, tier.pages * StoredBytes(kTestPageBytes)) << tier.tier;
    EXPECT_GE(tier.free_bytes, 0);
  }
}

}  // namespace heavywater
