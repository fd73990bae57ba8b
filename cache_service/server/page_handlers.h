// PageStoreService over the registry and the page store, as plain functions.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/registry/registry.h"
#include "cache_service/tier/host_page_store.h"
#include "heavywater/v1/page_store.pb.h"

namespace heavywater {

// Rows of one message of a stream.
inline constexpr int64_t kMaxChunkBytes = 1 << 20;

// Thread safe. Messages name field, got and wanted; what fails changes nothing.
class PageHandlers {
 public:
  // Both must outlive it. `offer_slab` false: ranks are told to stream.
  PageHandlers(Registry& registry, HostPageStore& store, bool offer_slab)
      : registry_(registry), store_(store), offer_slab_(offer_slab) {}

  absl::StatusOr<v1::AttachResponse> Attach(const v1::AttachRequest& request);
  absl::StatusOr<v1::ReserveResponse> Reserve(const v1::ReserveRequest& request);
  // One message of the stream; the rows that it held.
  absl::StatusOr<int64_t> WriteChunk(const v1::WriteRequest& request);
  absl::Status Commit(const v1::CommitRequest& request);
  absl::StatusOr<v1::AbortResponse> Abort(const v1::AbortRequest& request);

  // Checks a Read before its first chunk.
  absl::Status StartRead(const v1::ReadRequest& request);
  // The chunk after the first `done` positions; how many it holds. ABORTED when
  // the sequence ended between chunks.
  absl::StatusOr<int64_t> NextChunk(const v1::ReadRequest& request, int64_t done,
                                    v1::ReadResponse* chunk);

 private:
  Registry& registry_;
  HostPageStore& store_;
  const bool offer_slab_;
};

}  // namespace heavywater
