// Three tiers in this process: a slab, a fake disk, a fake remote.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "cache_service/tier/ordered_page_store.h"
#include "tests/cache_service/registry/fake_clock.h"
#include "tests/cache_service/tier/fake_tier.h"
#include "tests/cache_service/tier/page_store_conformance.h"

namespace heavywater {

class OrderedStoreFixture : public ::testing::Test {
 protected:
  // In pages; a sequence takes one more of the slab for its watermarks. High is at 90 %
  // of the slab, low at 50 %; a batch is four pages.
  void Make(int host_pages, int disk_pages = 1000, int remote_pages = 1000);

  // Written by one rank, `tokens` rows of every layer and head; finished unless told
  // otherwise.
  absl::Status Write(SequenceId sequence, int64_t tokens, int64_t reserved_pages = 0);
  void WriteAndFinish(SequenceId sequence, int64_t tokens, int64_t reserved_pages = 0);
  // Until there is nothing to do.
  void TurnUntilIdle();
  absl::Status ReadPage(SequenceId sequence, int64_t page, int layer = 0, int kv_head = 0,
                        int64_t rows = 16);
  // Every row of it is what the rank wrote.
  void ExpectAllRows(SequenceId sequence, int64_t tokens);
  void ExpectBalanced();

  PageKey Key(SequenceId sequence, int64_t page, int layer = 0, int kv_head = 0) const {
    return {sequence, kFingerprint, layer, kv_head, page};
  }
  TierStats Disk() const { return store_->Stats().below.at(0); }
  TierStats Remote() const { return store_->Stats().below.at(1); }

  static constexpr FingerprintId kFingerprint = 77;
  bool code_pages_ = false;  // of the next Make()
  FakeClock clock_;
  FakeTier* disk_ = nullptr;
  FakeTier* remote_ = nullptr;
  std::vector<std::string> changes_;  // what on_change was told: tier and code
  std::unique_ptr<OrderedPageStore> store_;
};

}  // namespace heavywater
