// A registry whose store has a tier below host memory.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/ordered_page_store.h"
#include "cache_service/tier/stored_page.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/registry/requests.h"
#include "tests/cache_service/tier/fake_tier.h"

namespace heavywater {

inline constexpr int64_t kUnit = 4096;

// One rank. The slab has room for 40 pages, the tier below for 32; a sequence of 64
// tokens takes 16 pages, and of the slab one unit more.
class TiersFixture : public ::testing::Test {
 protected:
  TiersFixture() {
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
  // Its tokens written and committed: at most 64.
  SequenceId OpenAndWrite(int64_t tokens = 64) {
    const auto id = Open();
    EXPECT_TRUE(id.ok()) << id.status();
    EXPECT_TRUE(
        store_->Reserve({.sequence = *id, .heads = {0, 2}, .num_pages = (tokens + 15) / 16}, false)
            .ok());
    for (const RowRange& rows : RowsOf(*id, tokens)) {
      const std::vector<std::byte> bytes(rows.num_positions * 256, static_cast<std::byte>(opened_));
      EXPECT_TRUE(store_->Write(0, rows, bytes).ok());
    }
    EXPECT_TRUE(store_->Commit(*id, 0, tokens).ok());
    clock_.Advance(absl::Milliseconds(10));
    return *id;
  }
  // With a state from which it can go on.
  SequenceId OpenAndFinish(int64_t tokens = 64) {
    const SequenceId id = OpenAndWrite(tokens);
    v1::ReportPlanRequest request = TestFinished(epoch_, id, static_cast<int>(tokens));
    AddTestState(tokens, *request.mutable_reports(0));
    EXPECT_TRUE(registry_->ReportPlan(request).ok());
    clock_.Advance(absl::Milliseconds(10));
    return id;
  }
  // All of its rows are there.
  bool IsWhole(SequenceId id, int64_t tokens = 64) {
    for (const RowRange& rows : RowsOf(id, tokens)) {
      std::vector<std::byte> bytes(rows.num_positions * 256);
      if (!store_->Read(rows, bytes).ok()) return false;
    }
    return true;
  }
  // Pages that some rank writes, until `free` are left.
  void FillHost(int64_t free) {
    ASSERT_TRUE(store_
                    ->Open({.sequence = kFiller,
                            .geometry = {.num_layers = 1,
                                         .num_kv_heads = 1,
                                         .page_tokens = 16,
                                         .row_bytes = 256},
                            .max_tokens = 1000})
                    .ok());
    const int64_t pages = store_->Stats().free_bytes / kUnit - free;
    ASSERT_TRUE(
        store_->Reserve({.sequence = kFiller, .heads = {0, 1}, .num_pages = pages}, true).ok());
  }
  // Of each page.
  static std::vector<RowRange> RowsOf(SequenceId id, int64_t tokens) {
    std::vector<RowRange> pages;
    for (int of_page = 0; of_page < 4; ++of_page) {
      for (int64_t first = 0; first < tokens; first += 16) {
        pages.push_back(
            {id, of_page / 2, of_page % 2, first, std::min<int64_t>(16, tokens - first)});
      }
    }
    return pages;
  }

  static constexpr SequenceId kFiller = 1000;
  FakeClock clock_;
  FakeTier* disk_ = nullptr;
  std::unique_ptr<OrderedPageStore> store_;
  std::unique_ptr<Registry> registry_;
  Epoch epoch_ = 0;
  int opened_ = 0;
};

}  // namespace heavywater
