// The fence: a rank stops writing to the slab by its own clock.
//
// A rank that is cut off from the cache service, but not from its peers, decodes
// on. Nobody tells it when the service ends one of its sequences (the lease is
// over, a client closes it) and gives the pages to others. So:
//
// 1. The service gives a sequence's lease anew whenever it accepts a Heartbeat
//    that lists it, or a Reserve: at the time H of its clock until H + lease. The
//    rank counts from S, when it SENT the last such call that it saw accepted.
//    S <= H, whatever the network did, and a call whose answer got lost does not
//    count here while it does there.
// 2. Only ranks on the service's node map the slab, so both clocks are the same
//    monotonic one: no drift, no jumps (Clock::Real()).
// 3. The rank gives out no address in the slab, copies nothing there and moves no
//    watermark from S + lease - margin on. The service reclaims pages of a writer
//    that has not said that it stopped at the end of the lease as given (also
//    where a client closes the sequence earlier), plus a grace of one rank lease,
//    at least a second (Registry::CollectEnded).
// 4. A write under way when the fence strikes: addresses are asked for layer by
//    layer and chunk by chunk, right before the rows are copied, and not kept. So
//    such a write is the copy of one layer's rows of one chunk, milliseconds; it
//    has margin + grace to end, seconds. The margin is a tenth of the lease, so
//    that short leases stay usable, and at most 2 s, which is many times what such
//    a copy takes on a machine that swaps.
// 5. While the service answers, no time is needed: an orphan is left out of
//    heartbeats, which frees its pages, only when no write to them is under way
//    (StopListing()). Only of heartbeats sent after the end: each names the last
//    answer that its rank has seen (answered_number), and counts where that was
//    given later. Earlier ones, which may be of before the rank knew the
//    sequence, can come at any time, in any number.
//
// 6. A process that was replaced and wakes within its time shares neither pages that
//    are not full nor the watermark with its successor (PageStore::Contest).
//
// What is left: a process that is frozen, by a signal or its machine, exactly
// between address and copy, and for longer than margin + grace beyond its lease.
// Sealed pages that it hits then read as DATA_LOSS.
#include <algorithm>

#include "worker/server/remote_host_tier.h"

namespace heavywater {
namespace {

constexpr absl::Duration kMaxMargin = absl::Seconds(2);

}  // namespace

bool RemoteHostTier::IsFenced(const Entry& entry) const {
  // Streamed pages lie in this process, and the service refuses what is too late.
  const RemoteSequence& sequence = *entry.sequence;
  if (sequence.slab() == nullptr || sequence.granted_pages() == 0) return false;
  const absl::Duration margin = std::min(entry.lease / 10, kMaxMargin);
  return link_.clock().Now() >= link_.RenewedAt(sequence.id()) + entry.lease - margin;
}

bool RemoteHostTier::MayNotWrite(Entry& entry) {
  if (!entry.orphan && IsFenced(entry)) {
    MakeOrphan(entry, "the service has not answered for as long as its lease");
  }
  return entry.orphan;
}

}  // namespace heavywater
