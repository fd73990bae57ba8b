// The pages of one sequence in the slab: where they lie, who fills them, how far
// they are written and sealed.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/tier/page_holders.h"
#include "cache_service/tier/page_place.h"
#include "cache_service/tier/page_store.h"
#include "cache_service/tier/slab.h"
#include "cache_service/tier/state_store.h"
#include "cache_service/tier/tier_residence.h"

namespace heavywater {

// Of a page that came from another sequence, until a rank of this one reserves it.
inline constexpr int16_t kNoRank = -1;

// What one rank has written of a sequence.
struct WrittenPart {
  int rank = 0;
  HeadRange heads = {};
  int64_t num_positions = 0;
};

// What a process that was replaced may still write to, and nobody uses any more: offsets.
struct ContestedMemory {
  std::vector<int64_t> pages;
  std::vector<int64_t> cells;  // of watermarks
};

// A page's bookkeeping: with its key and the table's overhead under 100 bytes.
struct PageEntry {
  int64_t offset = 0;                     // in the slab
  uint32_t crc = 0;                       // of the whole page as it is stored, once sealed
  int32_t rows_written = 0;               // leading rows that came through Write()
  uint32_t since = ResidenceClock();      // in its tier
  int16_t rank = 0;                       // that fills it, or kNoRank
  uint8_t tier = kHostTier;               // in a lower one `offset` means nothing
  PageDtype coding = PageDtype::kOpaque;  // of a page below that is stored at 8 bits
  bool direct : 1 = false;                // the rank may fill it in the slab, past rows_written
  bool sealed : 1 = false;
  bool summed : 1 = false;  // not sealed, but `crc` is already of the page as Write() got it, whole
  bool moving : 1 = false;  // to another tier: only whoever moves it may change its tier
  bool stuck : 1 = false;   // its bytes are damaged or lost: it moves nowhere
  bool resting : 1 = false;  // its rank does not read it in place before it asks for it
  bool rounded : 1 = false;  // has been stored at 8 bits
  bool shared : 1 = false;   // other sequences may hold its memory, too: nobody writes to it
  // A process of its rank that was replaced may still write to it: the next one gets a copy.
  bool contested : 1 = false;
};

// Not thread safe; HostPageStore holds its mutex around every call. The slab must
// outlive it. Does not allocate or free: offsets come from and go to the store.
class SequencePages {
 public:
  SequencePages(const SequenceSpec& spec, int64_t watermarks_offset, Slab& slab);
  SequencePages(SequencePages&&) = default;

  // --- Ranges ---
  absl::Status CheckRange(const PageRange& range) const;
  // Those of the range that are not reserved yet. FAILED_PRECONDITION when
  // another rank holds one of the others, or when one that is missing was skipped
  // or begins below the watermark (it would be readable before it is written).
  struct Missing {
    int64_t pages = 0;
    int64_t prompt_pages = 0;  // of them: within the prompt
    // The rank's, which it may change at any time, in whatever way: as it was looked at.
    int64_t watermark = 0;
  };
  absl::StatusOr<Missing> CountMissing(const PageRange& range) const;
  // Gives the missing pages `offsets`, in the order of [layer][head][page]. Shared ones that
  // the rank may write to, and contested ones, count as missing: they are copied there, and
  // `left` gets the offsets where they lay, but for the contested.
  Reservation Fill(const PageRange& range, int64_t watermark, std::span<const int64_t> offsets,
                   bool direct, std::vector<int64_t>* left);

  // --- Rows --- (as PageStore says)
  absl::Status Write(int rank, const RowRange& rows, std::span<const std::byte> bytes);
  absl::Status Commit(int rank, int64_t tokens);
  // The place of the page where it is not the slab: then no bytes are copied.
  absl::StatusOr<std::optional<PagePlace>> Read(const RowRange& rows, std::span<std::byte> bytes);
  int64_t Watermark(int rank) const;

  // As PageStore says; the offsets of the pages that the rank held.
  absl::StatusOr<std::vector<int64_t>> Skip(int rank, int64_t first_page, int64_t num_pages);
  // The rank has reserved pages.
  bool IsWriter(int rank) const { return heads_.contains(rank); }

  // Removes the rank's pages wholly above its watermark, or all pages; their
  // offsets.
  std::vector<int64_t> TakeUncommitted(int rank);
  std::vector<int64_t> TakeAll();

  // Ranks that may be writing in the slab.
  void StopWriter(int rank);
  bool has_writers() const { return !writers_.empty() || !contested_.empty(); }
  bool MayWriteInPlace(int rank) const { return writers_.contains(rank); }
  // Of each rank that has reserved pages: its heads, and how far they are written.
  std::vector<WrittenPart> Written() const;
  bool all_stopped() const { return static_cast<int>(stopped_.size()) == spec_.num_ranks; }

  const SequenceSpec& spec() const { return spec_; }
  void SetOwner(const std::string& tenant, PageDtype dtype) {
    spec_.tenant = tenant;
    spec_.dtype = dtype;
  }
  // More tokens will come: pages stay in the slab until all ranks have stopped again.
  // UNAVAILABLE naming a page that lies below: then nothing is changed.
  absl::Status Extend(int64_t max_tokens);
  // Positions from there on are not committed any more.
  void Truncate(int64_t tokens);
  // --- Processes that were replaced --- (sequence_pages_contested.cc)
  // The rank goes on with another process, from at most `tokens`; the one before may still
  // write to pages that are not wholly below, and to its watermark, which lies at `cell`
  // from now on (null: of a rank whose watermark was moved, and whose process knows it not).
  // MayWriteInPlace() of the next process once that reserves pages.
  void Contest(int rank, int64_t tokens, std::optional<int64_t> cell);
  // It does not any more. What is free by that.
  ContestedMemory EndContest(int rank);
  std::vector<int> ContestedRanks() const;
  int64_t num_contested() const { return num_contested_; }  // pages that nobody uses
  int64_t num_cells() const;                                // of watermarks that were moved
  std::vector<int64_t> TakeCells();                         // of a sequence that has ended

  // --- Pages of several sequences --- (sequence_pages_share.cc)
  // FAILED_PRECONDITION naming what differs: `spec` is of another shape or fingerprint.
  absl::Status CheckSource(const SequenceSpec& spec) const;
  // Whether all layers and heads of the page are committed, in host memory and whole: seals
  // or checks each. DATA_LOSS naming the one that has changed, which is stuck from then on.
  // `exact`: none may have been stored at 8 bits.
  absl::StatusOr<bool> PreparePage(int64_t page, bool exact);
  int64_t WrittenPages() const;  // up to the highest watermark
  // What of one is sealed and lies in host memory. DATA_LOSS likewise.
  absl::Status CheckPage(int64_t page);
  // Leading pages for which PreparePage() has held, at most `max`.
  int64_t PreparedPages(int64_t max, bool exact) const;
  // Of the first `max`: those that are committed and whose pages lie in host memory, the
  // last page's, which need not be whole, included.
  int64_t CopyableTokens(int64_t max) const;
  // Whether `tokens` are, or else why not, naming the first page that stands in the way:
  // DATA_LOSS where it is damaged or gone, UNAVAILABLE where it is not ready.
  absl::Status CheckCopyable(int64_t tokens) const;
  // A new sequence takes over the whole pages of the first `tokens` of `source`, and copies of
  // the page in which they end, if any, at `offsets`; its watermarks are `tokens`.
  void TakeFrom(SequencePages& source, int64_t tokens, std::span<const int64_t> offsets);
  // Nobody writes to it before it is extended.
  void StopAll();
  int64_t pages_of_row() const {  // of all layers and heads
    return int64_t{spec_.geometry.num_layers} * spec_.geometry.num_kv_heads;
  }
  // Offset and checksum of each page that others may hold, too.
  std::vector<std::pair<int64_t, uint32_t>> SharedPages() const;
  int64_t num_shared() const { return num_shared_; }

  // --- Tiers below --- (sequence_pages_tiers.cc)
  int TierOf(const RowRange& rows) const;
  // Of the first `tokens`; those that move right now, too.
  std::vector<PagePlace> PagesBelow(int64_t tokens) const;
  // Up to `max` pages of the tier that may leave it, marked as moving until Settle().
  // Of the host's those that are final, which are sealed by that: none unless all
  // ranks have stopped.
  std::vector<PagePlace> BeginMoves(int from, int64_t max);
  // Of all ranks, once they have stopped: pages that nobody can write or read any
  // more; their offsets.
  std::vector<int64_t> TakeUnreadable();
  // DATA_LOSS: the bytes do not match the seal.
  absl::Status CopyOut(const PagePlace& place, std::span<std::byte> bytes);
  // The moving page has been copied to tier `to`. Its offset in the slab, when it
  // leaves that one, is free.
  Relocation Relocate(const PagePlace& place, int to, const StoredAs& as,
                      std::optional<int64_t>* free_offset);
  void Settle(const PageKey& key);
  void MarkStuck(const PageKey& key);
  // Puts a page back into the slab at `offset`; it is moving until Settle(). False when it
  // does not lie in that place any more, or is moving already.
  bool Promote(const PagePlace& place, int64_t offset, std::span<const std::byte> bytes);

  // --- Pages that rest --- (sequence_pages_rest.cc)
  // As PageStore says. The pages are sealed by it.
  absl::Status Rest(int rank, std::span<const PageId> pages);
  // It rests no more. Its offset; or its place, where that is not the slab.
  struct Asked {
    int64_t offset = 0;
    std::optional<PagePlace> below;
  };
  absl::StatusOr<Asked> Ask(int rank, const PageId& page);
  void StopResting();  // of all pages
  int LowestTierOf(std::span<const PageId> pages) const;
  // Of the range; only those that lie below the slab.
  std::vector<PagePlace> PagesBelow(const PageRange& range) const;
  int64_t num_resting() const { return num_resting_; }
  // Pages in the slab whose room is there again when they leave it: not those of a stopped
  // sequence that others may hold.
  int64_t num_movable() const {
    return MayAllLeave() ? std::max<int64_t>(num_host_pages() - num_shared_, 0)
                         : static_cast<int64_t>(resting_in_slab_.size());
  }

  // --- What a restart needs --- (sequence_pages_state.cc)
  // Puts the changes since the last call into the batch; the store's own part along.
  struct Kept {
    bool released = false;
    int64_t promised_bytes = 0;
  };
  void TakeChanges(const Kept& kept, StateBatch& batch);
  void NoteChange() { changed_ = true; }  // of what the store keeps
  // Everything from now on.
  void TrackChanges();
  void StopTracking() { tracks_ = false; }
  // The sequence without pages, from its record; the watermarks are as they lie in the
  // slab. DATA_LOSS.
  static absl::StatusOr<SequencePages> Load(SequenceId id, std::string_view record, Slab& slab,
                                            Kept* kept);
  // One page from its record; its place, when it is not the slab. DATA_LOSS. `holders`: of
  // shared pages, those of the sequences loaded so far.
  absl::StatusOr<std::optional<PagePlace>> LoadPage(uint64_t number, std::string_view record,
                                                    PageHolders& holders);

  int64_t num_pages() const { return static_cast<int64_t>(pages_.size()); }
  int64_t num_host_pages() const { return num_pages() - num_below_; }
  int64_t watermarks_offset() const { return watermarks_offset_; }
  static int64_t WatermarksBytes(int num_ranks) { return num_ranks * kWatermarkCellBytes; }

 private:
  using Key = uint64_t;
  // The watermarks stay as they are.
  struct KeepWatermarks {};
  SequencePages(const SequenceSpec& spec, int64_t watermarks_offset, Slab& slab, KeepWatermarks)
      : spec_(spec), watermarks_offset_(watermarks_offset), slab_(slab) {}
  // Of page numbers.
  struct PageSpan {
    int64_t begin = 0;
    int64_t end = 0;
  };
  bool IsSkipped(int rank, int64_t page) const;
  absl::Status CheckSkip(int rank, int64_t first_page, int64_t num_pages) const;
  Key KeyOf(int layer, int kv_head, int64_t page) const;
  Key KeyOfRow(int64_t row, int64_t page) const {  // of pages_of_row()
    const int heads = spec_.geometry.num_kv_heads;
    return KeyOf(static_cast<int>(row / heads), static_cast<int>(row % heads), page);
  }
  absl::Status CheckRows(const RowRange& rows, size_t bytes) const;
  static int64_t PageOfKey(Key key) { return static_cast<int64_t>(key >> 20); }
  // Of the rank's own pages in the range: those that are reserved.
  std::vector<Key> ReservedKeys(const PageRange& range) const;
  absl::Status CheckWritten(Key key, const PageEntry& entry, int64_t tokens) const;
  // NOT_FOUND naming the page.
  absl::StatusOr<PageEntry*> Find(const RowRange& rows);
  PageEntry* FindKey(const PageKey& key);
  PagePlace PlaceOf(Key key, const PageEntry& entry) const;
  // Of whoever fills it; of a page that nobody has reserved yet as its source had it.
  int64_t WatermarkOf(const PageEntry& entry) const {
    return Watermark(std::max<int>(entry.rank, 0));
  }
  int64_t CommittedRows(int64_t page, int64_t watermark) const {
    const int64_t page_tokens = spec_.geometry.page_tokens;
    return std::clamp<int64_t>(watermark - page * page_tokens, 0, page_tokens);
  }
  int64_t CommittedTokens() const;
  absl::Status CheckReady(Key key, int64_t tokens) const;
  absl::Status CheckSeal(Key key, PageEntry& entry);
  // Whether all of the page's rows are committed.
  bool IsCommitted(Key key, const PageEntry& entry) const {
    return (PageOfKey(key) + 1) * spec_.geometry.page_tokens <= WatermarkOf(entry);
  }
  // The rank may write to a page that others hold: it gets one of its own.
  bool WantsCopy(Key key, const PageEntry& entry, int64_t watermark) const {
    if (entry.contested) return true;
    return entry.shared && (PageOfKey(key) + 1) * spec_.geometry.page_tokens > watermark;
  }
  // The page's memory is the sequence's no more: free, unless it is contested.
  void LetGo(const PageEntry& entry, std::vector<int64_t>* offsets);
  void CopyOnWrite(Key key, int64_t offset, int64_t watermark);
  void MarkShared(PageEntry& entry, bool shared) {
    num_shared_ += int64_t{shared} - int64_t{entry.shared};
    entry.shared = shared;
  }
  bool MayLeave(Key key, const PageEntry& entry, int from) const;
  // Nobody reads or writes in place.
  bool MayAllLeave() const { return all_stopped() && awaited_.empty(); }
  std::vector<PagePlace> BeginRestingMoves(int64_t max);
  absl::StatusOr<PageEntry*> FindOwn(int rank, const PageId& page);
  void SetResting(Key key, PageEntry& entry, bool resting);
  // After its tier, its resting or its being has changed; null: it is gone.
  void ListResting(Key key, const PageEntry* entry);
  std::span<std::byte> PageBytes(const PageEntry& entry) const;
  void Seal(Key key, PageEntry& entry);
  void CopyIn(PageEntry& entry, int first_row, std::span<const std::byte> rows);
  void Touch(Key key) {
    if (tracks_) touched_.push_back(key);
  }
  absl::Status LoadSets(RecordReader& reader);
  void SaveContested(RecordWriter& writer) const;
  absl::Status LoadContested(RecordReader& reader);
  int64_t CellOffset(int rank) const;
  std::atomic<int64_t>& WatermarkCell(int rank) const;

  SequenceSpec spec_;
  const int64_t watermarks_offset_;
  Slab& slab_;
  absl::flat_hash_map<Key, PageEntry> pages_;
  int64_t num_below_ = 0;    // of them: in a lower tier
  int64_t num_shared_ = 0;   // of them: shared
  int64_t num_resting_ = 0;  // of them: resting, in any tier
  absl::flat_hash_set<Key> resting_in_slab_;
  absl::flat_hash_map<int, HeadRange> heads_;  // by rank, all that it ever reserved
  // By rank, in the order in which they came, joined where they touch.
  absl::flat_hash_map<int, std::vector<PageSpan>> skipped_;
  absl::flat_hash_set<int> writers_;    // may be writing in the slab
  absl::flat_hash_set<int> streamers_;  // have used Write(), so write nothing in the slab
  absl::flat_hash_set<int> stopped_;
  absl::flat_hash_map<int, int64_t> cells_;              // watermarks that were moved, by rank
  absl::flat_hash_map<int, ContestedMemory> contested_;  // by rank, while it may be written to
  int64_t num_contested_ = 0;                            // pages there
  absl::flat_hash_set<int> awaited_;  // since Extend(), until they reserve or stop
  bool tracks_ = false;
  bool changed_ = false;      // anything but pages_
  std::vector<Key> touched_;  // of pages_; also those that are gone
};

}  // namespace heavywater
