// PageStoreService over the registry and the page store, as plain functions.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/executor.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/page_store.h"
#include "cache_service/tier/slab.h"
#include "heavywater/v1/page_store.pb.h"

namespace heavywater {

// Rows of one message of a stream.
inline constexpr int64_t kMaxChunkBytes = 1 << 20;

// Thread safe. Messages name field, got and wanted; what fails changes nothing.
class PageHandlers {
 public:
  // All must outlive it. `slab`: what ranks are told to map; null: they stream.
  // `tier_threads`: one for each tier below the host's, in their order.
  PageHandlers(Registry& registry, PageStore& store, const Slab* slab,
               std::vector<Executor*> tier_threads = {})
      : registry_(registry), store_(store), slab_(slab), tier_threads_(std::move(tier_threads)) {}

  absl::StatusOr<v1::AttachResponse> Attach(const v1::AttachRequest& request);
  absl::StatusOr<v1::ReserveResponse> Reserve(const v1::ReserveRequest& request);
  absl::Status Rest(const v1::RestRequest& request);
  absl::StatusOr<v1::AskResponse> Ask(const v1::AskRequest& request);
  // Runs `work`, which calls Reserve() or Ask(), as RunForChunk() does: on the thread of the
  // lowest tier from which it brings something up.
  absl::Status RunForReserve(const v1::ReserveRequest& request, std::function<void()> work);
  absl::Status RunForAsk(const v1::AskRequest& request, std::function<void()> work);
  // One message of the stream; the rows that it held.
  absl::StatusOr<int64_t> WriteChunk(const v1::WriteRequest& request);
  absl::Status Commit(const v1::CommitRequest& request);
  absl::StatusOr<v1::AbortResponse> Abort(const v1::AbortRequest& request);

  // Checks a Read before its first chunk. NOT_FOUND, too, for what `viewer` may not see.
  absl::Status StartRead(const v1::ReadRequest& request, const Viewer& viewer = Viewer::All());
  // Runs `work`, which calls NextChunk(): at once where the rows lie in host memory,
  // else on the thread of their tier, so that one that is slow or away holds up nobody
  // else. UNAVAILABLE: too many wait for that tier; `work` is not run.
  absl::Status RunForChunk(const v1::ReadRequest& request, int64_t done,
                           std::function<void()> work);
  // The chunk after the first `done` positions; how many it holds. ABORTED when
  // the sequence ended between chunks.
  absl::StatusOr<int64_t> NextChunk(const v1::ReadRequest& request, int64_t done,
                                    v1::ReadResponse* chunk);

 private:
  // INVALID_ARGUMENT: lists of several lengths, or too long.
  static absl::StatusOr<std::vector<PageId>> PagesOf(const v1::PageIds& ids);

  Registry& registry_;
  PageStore& store_;
  const Slab* const slab_;
  const std::vector<Executor*> tier_threads_;
};

}  // namespace heavywater
