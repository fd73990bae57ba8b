// The host pages of one sequence on one rank, wherever they lie: in the
// service's slab, or in this process until they can be copied or streamed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "cache_service/base/ids.h"
#include "cache_service/tier/host_tier.h"
#include "cache_service/tier/slab_view.h"
#include "worker/backend/backend.h"
#include "worker/server/page_client.h"
#include "worker/server/registered_memory.h"

namespace heavywater {

// Rows that lie in this process, and where they belong in the slab (null: they
// are streamed).
struct LocalRows {
  std::vector<PageRows> rows;
  std::vector<std::byte*> targets;

  void CopyToSlab() const;
};

// Not thread safe. The bytes of pages are apart from that: the rank writes rows
// at and above what it has published while another thread reads those below. A
// page stays where it is once it has memory.
class RemoteSequence {
 public:
  // `slab` null: pages are streamed. `backend` must know pages that lie in this
  // process (registered_memory.h) and outlives them; null: none needs to.
  RemoteSequence(SequenceId id, const PageGeometry& geometry, HeadRange heads,
                 std::shared_ptr<SlabView> slab, Backend* backend = nullptr);

  SequenceId id() const { return id_; }
  const PageGeometry& geometry() const { return geometry_; }
  HeadRange heads() const { return heads_; }
  const std::shared_ptr<SlabView>& slab() const { return slab_; }
  // Only while no page has been granted.
  void set_slab(std::shared_ptr<SlabView> slab) { slab_ = std::move(slab); }

  // Pages [0, num_pages()) have memory (or are skipped); of [0, granted_pages())
  // the service knows, too: they have a place there (or are skipped).
  int64_t num_pages() const { return static_cast<int64_t>(pages_.size()); }
  int64_t granted_pages() const { return granted_pages_; }
  bool has_local_pages() const { return local_pages_ > 0; }
  int64_t page_row_bytes() const;  // one page number: all layers and heads of the rank
  int64_t reserved_bytes() const { return (num_pages() - skipped_pages_) * page_row_bytes(); }
  int64_t ungranted_bytes() const;
  // Null when the page has no memory.
  std::byte* Page(int layer, int kv_head, int64_t page) const;

  // Whether the page lies in the slab and is committed as a whole.
  bool MayRest(const PageId& page) const;
  // Where such a page lies now; null: it rests. Returns where it lay.
  std::byte* SetMemory(const PageId& page, std::byte* memory);

  // Memory of this process for pages up to `end_page`. RegisteredMemory's errors;
  // some pages may have come.
  absl::Status AddLocalPages(int64_t end_page);
  // Pages [first_page, end_page) never get memory, nor do pages before them that
  // have none; they lie above what is published.
  void SkipPages(int64_t first_page, int64_t end_page);

  // The next pages to ask the service for, up to `end_page`; or to give up there.
  struct PageSpan {
    int64_t first = 0;
    int64_t count = 0;
    bool skipped = false;
  };
  PageSpan NextGrant(int64_t end_page) const;
  // The service's answer: pages without memory get the slab's (or local memory,
  // to be streamed); not those that have been skipped since they were asked for.
  // DATA_LOSS naming an offset outside of the slab.
  absl::Status AddGrant(PageSpan span, std::span<const int64_t> offsets, int64_t watermark_offset);
  // The service knows that the pages will not be written: its readers find no
  // page there, so that the watermark may pass them.
  void AddSkip(PageSpan span);

  // Published by the rank; committed at the service.
  int64_t published() const { return published_; }
  int64_t committed() const { return committed_; }
  // What the slab's watermark says, whoever raised it; 0 unless all pages lie there.
  int64_t stored() const;
  void Publish(int64_t tokens);
  // What can be committed now.
  int64_t CommitEnd() const;
  LocalRows RowsToMove(int64_t begin, int64_t end) const;
  // Rows below `tokens` have arrived; in a slab this tells its readers.
  void Committed(int64_t tokens);

 private:
  // One page number.
  struct PageRow {
    std::vector<std::byte*> memory;           // [layer][head]; empty: skipped
    std::vector<std::byte*> target;           // in the slab, of local pages once granted
    std::unique_ptr<RegisteredMemory> local;  // null: memory lies in the slab
  };
  size_t Index(int layer, int kv_head) const {
    return static_cast<size_t>(layer) * heads_.count + (kv_head - heads_.first);
  }
  absl::Status SlabAddresses(std::span<const int64_t> offsets, int64_t page, int64_t num_pages,
                             std::vector<std::byte*>& addresses) const;
  void NoteGranted(PageSpan span);
  void PlacePage(int64_t page, std::vector<std::byte*> addresses);
  bool is_skipped(int64_t page) const {
    return page < num_pages() && pages_[static_cast<size_t>(page)].memory.empty();
  }

  const SequenceId id_;
  const PageGeometry geometry_;
  const HeadRange heads_;
  Backend* const backend_;
  std::shared_ptr<SlabView> slab_;
  std::vector<PageRow> pages_;
  int64_t granted_pages_ = 0;
  int64_t local_pages_ = 0;
  int64_t skipped_pages_ = 0;
  std::atomic<int64_t>* watermark_ = nullptr;
  int64_t published_ = 0;
  int64_t committed_ = 0;
};

}  // namespace heavywater
