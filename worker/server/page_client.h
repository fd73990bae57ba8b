// Calls to the cache service's page store, for one rank.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/ids.h"
#include "cache_service/tier/host_tier.h"
#include "heavywater/v1/page_store.grpc.pb.h"
#include "worker/server/cache_link.h"

namespace heavywater {

// Consecutive rows of one layer and KV head, within one page.
struct PageRows {
  int layer = 0;
  int kv_head = 0;
  int64_t first_position = 0;
  std::span<const std::byte> rows;
};

// Thread safe. Each call is one try with a deadline of seconds; its end is
// noted in the link, which must outlive this.
class PageClient {
 public:
  explicit PageClient(CacheLink& link);

  absl::StatusOr<v1::AttachResponse> Attach();
  absl::StatusOr<v1::ReserveResponse> Reserve(SequenceId sequence, HeadRange heads,
                                              int64_t first_page, int64_t num_pages);
  // Two-phase: nothing is readable before Commit().
  absl::Status Write(SequenceId sequence, int row_bytes, const std::vector<PageRows>& pages);
  absl::Status Commit(SequenceId sequence, int64_t tokens);
  // Pages that this rank does not read for now, and those that it wants to read again.
  absl::Status Rest(SequenceId sequence, const std::vector<PageId>& pages);
  absl::StatusOr<v1::AskResponse> Ask(SequenceId sequence, const std::vector<PageId>& pages);
  // This rank will never write the pages.
  absl::Status Skip(SequenceId sequence, int64_t first_page, int64_t num_pages);

 private:
  CacheLink& link_;
};

}  // namespace heavywater
