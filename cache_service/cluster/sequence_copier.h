// Sequences as copies in a Redis: written whole by the service that has one, and brought
// back into the store of another.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/ids.h"
#include "cache_service/registry/sequence_registry.h"
#include "cache_service/tier/ordered_page_store.h"
#include "cache_service/tier/remote_copies.h"
#include "heavywater/v1/cache_cluster.pb.h"

namespace heavywater {

// Thread safe. Waits for the network and the tiers: not under a lock.
class SequenceCopier {
 public:
  // All must outlive it.
  SequenceCopier(RemoteCopies& copies, SequenceRegistry& sequences, OrderedPageStore& store)
      : copies_(copies), sequences_(sequences), store_(store) {}

  // A copy by that name, of a sequence that nobody writes to, which goes `ttl` from now.
  // ABORTED: it was written to meanwhile; RESOURCE_EXHAUSTED: its pages have more than
  // `max_bytes`; NOT_FOUND: it has ended, or pages of it were given up; FAILED_PRECONDITION: a
  // fork without a turn of its own; UNAVAILABLE.
  absl::StatusOr<v1::CopyRecord> CopyOut(SequenceId id, const std::string& name, int64_t max_bytes,
                                         absl::Duration ttl);

  // Puts the pages of the copy into the store; the state that goes with them. Where it fails
  // nothing is left in the store. NOT_FOUND, DATA_LOSS: the copy is not whole; UNAVAILABLE,
  // RESOURCE_EXHAUSTED: not now.
  absl::StatusOr<v1::SequenceState> CopyIn(SequenceId id, const v1::CopyRecord& copy);
  // Takes them out again.
  void TakeOut(SequenceId id) { (void)store_.Release(id); }

  absl::Status Erase(const std::string& name) { return copies_.Erase(name); }

 private:
  struct Pages;
  absl::Status CopyPartOut(const Pages& pages, const WrittenPart& part, const std::string& name,
                           absl::Duration ttl, v1::CopyRecord* copy);
  absl::Status CopyPartIn(const Pages& pages, const WrittenPart& part, const std::string& name);
  absl::Status Reserve(const Pages& pages, const WrittenPart& part);
  absl::Status Open(const Pages& pages, const v1::SequenceCopyState& state);

  RemoteCopies& copies_;
  SequenceRegistry& sequences_;
  OrderedPageStore& store_;
};

}  // namespace heavywater
