// Where the KV pages of sequences live below the device. One store holds all
// sequences; conformance tests in tests/cache_service/tier run on every
// implementation.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/ids.h"
#include "cache_service/tier/host_tier.h"
#include "cache_service/tier/page_geometry.h"
#include "cache_service/tier/page_place.h"
#include "cache_service/tier/tenant_book.h"
#include "cache_service/tier/tier_residence.h"

namespace heavywater {

inline constexpr int kMaxWriters = 1024;  // of a sequence
inline constexpr int64_t kAllTokens = std::numeric_limits<int64_t>::max();

// What a sequence may come to hold.
struct SequenceSpec {
  SequenceId sequence = 0;
  FingerprintId fingerprint = 0;
  PageGeometry geometry = {};
  int num_ranks = 1;          // that write to it, each with its own watermark
  int64_t max_tokens = 0;     // no position may be beyond
  int64_t prompt_tokens = 0;  // room that admission holds for it
  // Whose quota bounds what it holds, in all tiers.
  std::string tenant = {};
  // Of the numbers in its rows, where they may be stored at 8 bits below.
  PageDtype dtype = PageDtype::kOpaque;
};

// A reservation's answer must fit into one message.
inline constexpr int64_t kMaxPagesPerReservation = 1 << 18;

// Of one Rest() or Ask().
inline constexpr int64_t kMaxPagesPerRest = 1024;

// Pages of one rank: all layers, `heads`, [first_page, first_page + num_pages).
struct PageRange {
  SequenceId sequence = 0;
  int rank = 0;
  HeadRange heads = {};
  int64_t first_page = 0;
  int64_t num_pages = 0;
};

// Where a rank that maps the slab writes.
struct Reservation {
  std::vector<int64_t> offsets;  // bytes, [layer][head][page] of the range
  int64_t watermark_offset = 0;  // bytes, of the rank's committed watermark
};

// What a sequence begins with.
struct PageSource {
  SequenceId sequence = 0;  // that has them
  int64_t tokens = 0;       // its first ones, at most
  // Nobody writes to the new sequence until it is extended; the page in which the tokens end
  // is copied. Else only whole pages count, and its ranks come.
  bool fork = false;
  int64_t min_tokens = 0;  // of a fork: fewer are refused
};

// Rows of one page: positions [first_position, first_position + num_positions).
struct RowRange {
  SequenceId sequence = 0;
  int layer = 0;
  int kv_head = 0;
  int64_t first_position = 0;
  int64_t num_positions = 0;
};

// Of one tier below host memory.
struct TierStats {
  std::string tier;         // "disk", "remote"
  int64_t total_bytes = 0;  // free + used = total at all times
  int64_t used_bytes = 0;
  int64_t free_bytes = 0;
  int64_t pages = 0;
  int64_t hits = 0;        // reads that it answered
  int64_t moved_in = 0;    // pages that came down into it
  int64_t moved_down = 0;  // to the next tier
  int64_t moved_up = 0;    // back to host memory
  // Pages that could not be stored, read or erased, by reason.
  struct Failures {
    int64_t full = 0;
    int64_t unavailable = 0;
    int64_t corrupt = 0;  // DATA_LOSS for that page
    int64_t missing = 0;  // was stored, is not there any more
    int64_t other = 0;
  } failures = {};
};

struct PageStoreStats {
  int64_t total_bytes = 0;  // free + used = total at all times
  int64_t used_bytes = 0;
  int64_t free_bytes = 0;
  int64_t promised_bytes = 0;  // of the free: held for admitted prompts
  int64_t retiring_bytes = 0;  // of the used: let go, a rank may still be writing there
  int64_t sequences = 0;
  int64_t pages = 0;          // reserved; one that several sequences hold counts once
  int64_t shared_pages = 0;   // of them: held by more than one
  int64_t resting_pages = 0;  // of sequences that are being decoded, in all tiers
  int64_t pages_asked = 0;    // by Ask()
  int64_t pages_lost = 0;     // of them: gone
  int64_t reservations_refused = 0;
  int64_t writes = 0;  // through Write(), each of rows of one page
  int64_t bytes_written = 0;
  int64_t reads = 0;  // through Read(), likewise
  int64_t bytes_read = 0;
  int64_t checksum_failures = 0;
  int64_t moved_down = 0;                               // pages, to the first tier below
  int64_t moved_up = 0;                                 // pages that came back from any
  std::vector<TierStats> below = {};                    // in their order
  std::array<TierResidence, kMaxTiers> residence = {};  // from the host's 0

  // Reads that the host tier answered.
  int64_t host_hits() const {
    int64_t hits = reads;
    for (const TierStats& tier : below) hits -= tier.hits;
    return hits;
  }
};

// What of the slab sequences that are being decoded should let go of, and what takes the
// room that could: neither what rests already nor what may leave without them.
struct HostPressure {
  int64_t shortage_bytes = 0;  // 0: there is room, or no tier below
  int64_t restable_bytes = 0;
};

// Thread safe. Nothing that fails changes anything but a counter.
class PageStore {
 public:
  virtual ~PageStore() = default;

  // Admits a sequence and holds room for its prompt. RESOURCE_EXHAUSTED naming
  // need, free and limit, of the tier or of the tenant's quota; ALREADY_EXISTS.
  virtual absl::Status Open(const SequenceSpec& spec) = 0;

  // As Open(), with the first tokens of another sequence, whose whole pages both then hold:
  // neither writes to them (a rank that reserves one to go on within it gets a copy), and the
  // memory is free when nobody holds them. How many tokens it begins with: as many as are
  // committed and lie in host memory, which is its watermark; ranks take over the pages
  // by Reserve(). FAILED_PRECONDITION naming what differs: another shape or fingerprint.
  // Fewer than a fork's min_tokens: DATA_LOSS naming a page that is damaged or gone, or
  // UNAVAILABLE naming one that BringUp() and PrepareShare() have to make ready.
  virtual absl::StatusOr<int64_t> OpenFrom(const SequenceSpec& spec, const PageSource& source) = 0;
  // Of the sequence's first `tokens`: how many lie in whole pages that OpenFrom() would
  // share. Seals those that are not sealed and checks the others: all of their bytes are read,
  // without keeping others from the sequence for long. `exact`: none that was stored at 8 bits
  // counts, as without PageSource::fork. NOT_FOUND.
  virtual absl::StatusOr<int64_t> PrepareShare(SequenceId sequence, int64_t tokens, bool exact) = 0;

  // Makes pages writable for one rank; those that it holds already are returned
  // again, and rest no more: what of them lies below is brought up, which waits for those
  // tiers. All or nothing. RESOURCE_EXHAUSTED naming need, free and limit;
  // FAILED_PRECONDITION when another rank holds one of them, or when a new one
  // begins below the rank's watermark or was skipped. `direct`: the rank
  // has mapped the slab, so that its pages are not reused before it is known to
  // have stopped (StopWriter()).
  virtual absl::StatusOr<Reservation> Reserve(const PageRange& range, bool direct) = 0;

  // Copies whole rows into a reserved page. For ranks without the slab: a rank
  // does one or the other for all pages of a sequence. Rows of
  // a page arrive in ascending order, without gaps; rows below the rank's
  // watermark are FAILED_PRECONDITION.
  virtual absl::Status Write(int rank, const RowRange& rows, std::span<const std::byte> bytes) = 0;

  // Positions below `tokens` become readable for the rank's heads. Never goes
  // back. FAILED_PRECONDITION naming a page whose rows have not all been
  // written. Only for what came through Write(): ranks with the slab raise their
  // watermark in it.
  virtual absl::Status Commit(SequenceId sequence, int rank, int64_t tokens) = 0;

  // Gives back the rank's pages that lie wholly above its watermark; how many.
  virtual absl::StatusOr<int64_t> Abort(SequenceId sequence, int rank) = 0;

  // The rank will never write these pages: what it holds of them is given back
  // (returned: how many pages of layers and heads), they cannot be reserved any
  // more, the watermark passes over them and reads of them are NOT_FOUND. A
  // replay changes nothing. FAILED_PRECONDITION when one of them begins below the
  // watermark: it may have been read.
  virtual absl::StatusOr<int64_t> Skip(SequenceId sequence, int rank, int64_t first_page,
                                       int64_t num_pages) = 0;

  // Copies committed rows out: their own bytes, or an error. NOT_FOUND: no such
  // sequence or page (a skipped one, say); OUT_OF_RANGE: above the watermark;
  // DATA_LOSS: the bytes of a sealed page have changed; UNAVAILABLE: the tier in
  // which it lies cannot be reached now.
  virtual absl::Status Read(const RowRange& rows, std::span<std::byte> bytes) = 0;

  // Where Read() would find the rows now: kHostTier also when it would not.
  virtual int TierOf(const RowRange& rows) const = 0;

  // The rank will not read these pages of its own in place until it has asked for them:
  // they may leave the slab before it has stopped. A page that rests already stays so. All
  // or nothing. NOT_FOUND; FAILED_PRECONDITION naming a page that is not wholly below the
  // rank's watermark, or another rank's; INVALID_ARGUMENT: too many.
  virtual absl::Status Rest(SequenceId sequence, int rank, std::span<const PageId> pages) = 0;
  // Where each page lies in the slab, to be read in place again: it stays until it rests
  // once more. Brings up what lies below, which waits for those tiers: not under a lock.
  // Pages end each by itself: RESOURCE_EXHAUSTED, UNAVAILABLE: later perhaps; NOT_FOUND,
  // DATA_LOSS: it is gone; FAILED_PRECONDITION: another rank's. Of the whole call: as
  // Rest().
  virtual absl::StatusOr<std::vector<absl::StatusOr<int64_t>>> Ask(
      SequenceId sequence, int rank, std::span<const PageId> pages) = 0;
  // The lowest tier in which one of the pages lies; kHostTier also when there is none.
  virtual int LowestTierOf(SequenceId sequence, std::span<const PageId> pages) const = 0;
  virtual int LowestTierOf(const PageRange& range) const = 0;
  virtual HostPressure Pressure() { return {}; }

  // Ends the sequence: nothing of it can be read or written any more.
  virtual absl::Status Release(SequenceId sequence) = 0;

  // Positions up to `max_tokens` may come, more than it was opened for: its pages stay in host
  // memory until each rank has stopped again. NOT_FOUND; UNAVAILABLE: one lies below.
  virtual absl::Status Extend(SequenceId sequence, int64_t max_tokens) = 0;
  // Positions from `tokens` on can be read no more, and written anew: of a sequence that
  // nobody writes to. Once all its ranks have stopped, pages in host memory that hold
  // nothing else are free; others are so when the sequence is brought up or ends. NOT_FOUND.
  virtual absl::Status Truncate(SequenceId sequence, int64_t tokens) = 0;
  // Brings all of its pages that hold the first `tokens` to host memory: OK when they are
  // there. RESOURCE_EXHAUSTED: no room; else as Read(). Waits for the tiers below: not under a
  // lock.
  virtual absl::Status BringUp(SequenceId sequence, int64_t tokens) = 0;
  absl::Status BringUp(SequenceId sequence) { return BringUp(sequence, kAllTokens); }

  // Reads all of its pages in host memory that are sealed. DATA_LOSS naming one whose bytes have
  // changed, which counts as damaged from then on; NOT_FOUND.
  virtual absl::Status CheckPages(SequenceId sequence) = 0;

  // The rank goes on with another process, from at most `tokens` of what is written, and the
  // one before may still write in the slab, if it has not stopped (StopWriter()): the new one
  // gets copies of pages that are not full by Reserve(), and a watermark of its own. What the
  // other can reach is not used again before EndContest(), or StopWriter() of the rank.
  // RESOURCE_EXHAUSTED, NOT_FOUND.
  virtual absl::Status Contest(SequenceId sequence, int rank, int64_t tokens) = 0;
  // No process that was replaced writes to the sequence any more.
  virtual void EndContest(SequenceId sequence) = 0;

  // The rank will never again write to the sequence's pages in the slab.
  virtual void StopWriter(SequenceId sequence, int rank) = 0;

  // 0 for an unknown sequence or rank.
  virtual int64_t Watermark(SequenceId sequence, int rank) const = 0;
  // The rank has reserved pages of the sequence: its watermark says how far they
  // are written.
  virtual bool IsWriter(SequenceId sequence, int rank) const = 0;
  // A rank may be writing to the sequence in the slab: its end frees nothing before that stops.
  virtual bool HasWriters(SequenceId sequence) const = 0;
  // Bytes of the sequence's pages in host memory, and in all tiers.
  virtual int64_t HostBytes(SequenceId sequence) const = 0;
  virtual int64_t SequenceBytes(SequenceId sequence) const = 0;
  // Of several in host memory; pages that more than one of them holds count once.
  virtual int64_t HostBytesTogether(std::span<const SequenceId> sequences) const = 0;
  // What the end of each of these would free of host memory if those before it had ended: pages
  // that others hold are free with the last one. 0 for unknown ones.
  virtual std::vector<int64_t> FreedBytes(std::span<const SequenceId> sequences) const = 0;

  // `full`: how Open() or Reserve() refused. Moves what nobody writes to the tiers
  // below, of the tenant where its quota was full, but not of sequence `spared`; OK when it is
  // worth another try, else `full`. Waits for those tiers: not under a lock.
  virtual absl::Status MakeRoom(const absl::Status& full, SequenceId spared) = 0;
  absl::Status MakeRoom(const absl::Status& full) { return MakeRoom(full, /*spared=*/0); }
  // Its pages stay in the tier where they are. Nothing for an unknown one.
  virtual void SetPinned(SequenceId sequence, bool pinned) = 0;
  // After a restart, which has brought back the pages but not whose and what they are.
  virtual void SetOwner(SequenceId sequence, const std::string& tenant, PageDtype dtype) = 0;
  virtual TenantBook& tenants() = 0;
  virtual PageStoreStats Stats() const = 0;
};

}  // namespace heavywater
