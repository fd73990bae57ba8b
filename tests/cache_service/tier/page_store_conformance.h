// What every PageStore must do. A test file names its store and how to make it:
//   INSTANTIATE_TEST_SUITE_P(Slab, PageStoreConformance, Values(PageStoreFactory{...}));
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cache_service/tier/page_store.h"

namespace heavywater {

struct PageStoreFactory {
  std::string name;
  std::function<std::unique_ptr<PageStore>(int64_t bytes)> make;
};

// One page is one unit of 4096 bytes: 16 tokens of 256 bytes.
inline constexpr PageGeometry kTestGeometry = {
    .num_layers = 2, .num_kv_heads = 2, .page_tokens = 16, .row_bytes = 256};
inline constexpr int64_t kTestPageBytes = 4096;

// Bytes that differ for every sequence, layer, head, position and place.
std::vector<std::byte> TestRows(const RowRange& rows);

class PageStoreConformance : public ::testing::TestWithParam<PageStoreFactory> {
 protected:
  void Make(int64_t bytes) { store_ = GetParam().make(bytes); }
  absl::Status Open(SequenceId sequence, int64_t prompt_tokens = 0, int num_ranks = 1);
  absl::StatusOr<Reservation> Reserve(SequenceId sequence, int64_t first_page, int64_t num_pages,
                                      int rank = 0);
  absl::Status Write(int rank, const RowRange& rows) {
    return store_->Write(rank, rows, TestRows(rows));
  }
  // Rows [0, tokens) of all layers and heads, page by page.
  absl::Status WriteAll(SequenceId sequence, int64_t tokens);
  absl::StatusOr<std::vector<std::byte>> Read(const RowRange& rows);
  void ExpectBalanced() const;

  std::unique_ptr<PageStore> store_;
};

}  // namespace heavywater
