// What a page is: the one place where its bytes are computed.
#pragma once

#include <cstdint>

#include "absl/status/status.h"

namespace heavywater {

// Layout of one sequence's pages. A page holds `page_tokens` consecutive
// positions of one layer and one KV head; position p of page p / page_tokens
// lies at row p % page_tokens; a row is the K vector and then the V vector, in
// the cache's dtype.
struct PageGeometry {
  int num_layers = 0;
  int num_kv_heads = 0;  // of the model, all ranks together
  int page_tokens = 256;
  int row_bytes = 0;  // K and V of one position: 2 * head_dim * element bytes

  int64_t page_bytes() const { return int64_t{page_tokens} * row_bytes; }
  int64_t PageOf(int64_t position) const { return position / page_tokens; }
  int RowOf(int64_t position) const { return static_cast<int>(position % page_tokens); }
  int64_t PagesFor(int64_t tokens) const { return (tokens + page_tokens - 1) / page_tokens; }

  // INVALID_ARGUMENT naming the field, what came and what was wanted.
  absl::Status Validate() const;
  bool operator==(const PageGeometry&) const = default;
};

}  // namespace heavywater
