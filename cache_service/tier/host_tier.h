// A rank's view of the host tier: memory that the rank fills directly with the
// K and V of its own heads, behind every step (write-through), so that an
// eviction moves nothing.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cache_service/base/ids.h"
#include "cache_service/tier/page_geometry.h"

namespace heavywater {

// The KV heads of one rank: [first, first + count) of the model's.
struct HeadRange {
  int first = 0;
  int count = 0;
};

// A page of a sequence: `page_tokens` positions of one layer and KV head (of the model).
struct PageId {
  int layer = 0;
  int kv_head = 0;
  int64_t page = 0;

  bool operator==(const PageId&) const = default;
  auto operator<=>(const PageId&) const = default;
};

// Used by one thread (the rank's step); implementations move bytes and talk to
// the cache service on threads of their own. Nothing here waits for the
// network except Reserve(), which the rank calls ahead of need, and AwaitAsked().
class HostTier {
 public:
  virtual ~HostTier() = default;

  // ALREADY_EXISTS when the sequence is open.
  virtual absl::Status OpenSequence(SequenceId sequence, const PageGeometry& geometry,
                                    HeadRange heads) = 0;

  // Makes the pages [first_page, first_page + num_pages) writable, for all
  // layers and this rank's heads; pages already reserved stay. All or nothing.
  // RESOURCE_EXHAUSTED naming need and limit when the tier is full,
  // UNAVAILABLE when the service cannot be reached.
  virtual absl::Status Reserve(SequenceId sequence, int64_t first_page, int64_t num_pages) = 0;

  // The rank will never write these pages, none of which begins below what it has
  // published. Room that they have (it may have come just now) is given back,
  // they cannot be reserved any more, and reads of them are misses.
  virtual void Skip(SequenceId sequence, int64_t first_page, int64_t num_pages) = 0;

  // The memory of one page, page_bytes() long, or null when it is not reserved
  // (then its positions will count as dropped) or rests. `kv_head` counts over the
  // whole model. Valid until CloseSequence(), or until the page rests.
  virtual std::byte* Page(SequenceId sequence, int layer, int kv_head, int64_t page) = 0;

  // All layers and heads of this rank have been written for positions below
  // `tokens` (a release store in shared memory). Never goes back.
  virtual void Publish(SequenceId sequence, int64_t tokens) = 0;

  // How many tokens of an open sequence its pages held before this process opened it,
  // all of them mapped now: what another process, or this one, has published. 0 where
  // nothing can be taken over.
  virtual int64_t StoredTokens(SequenceId sequence) const { return 0; }

  // --- Pages that rest: host memory is short, and there is a tier below it ---
  // How many bytes of the sequence's pages should rest now, beside those that do.
  virtual int64_t BytesToRest(SequenceId sequence) { return 0; }
  // Full pages, published as a whole, that the rank will not read until it has asked for
  // them: Page() is null from now on, and their memory may go to others. Pages that cannot
  // rest stay as they are.
  virtual void Rest(SequenceId sequence, std::span<const PageId> pages) {}
  // Asks for resting pages, which come when they can: Page() is not null any more then.
  virtual void Ask(SequenceId sequence, std::span<const PageId> pages) {}
  // Waits until one of the pages that were asked for has come or is lost, or `max` is over.
  virtual void AwaitAsked(SequenceId sequence, absl::Duration max) {}
  // Pages that were asked for and are lost: each is returned once, and never comes.
  virtual std::vector<PageId> TakeGone(SequenceId sequence) { return {}; }

  // Nothing of the sequence is kept any more, neither what was written nor what
  // will be: it has ended at the cache service, or was lost with it. Never goes
  // back.
  virtual bool IsLost(SequenceId sequence) const = 0;

  // The rank is done. The pages live on in the cache service until the
  // sequence's lease ends.
  virtual void CloseSequence(SequenceId sequence) = 0;

  // Bytes of all pages reserved by this rank.
  virtual int64_t reserved_bytes() const = 0;
};

}  // namespace heavywater
