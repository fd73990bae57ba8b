// Write-through: where the bytes of one sequence's positions go in host memory,
// and which positions found no place.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/tier/host_tier.h"
#include "worker/backend/backend.h"
#include "worker/rank/plan_report.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/sequence_options.h"

namespace heavywater {

// A page has room from its first position on, or none at all.
class HostPages {
 public:
  // Opens the sequence in the tier and reserves the prompt's pages (and
  // reserve_ahead_tokens, if there is room). No tier: every position is
  // unbacked. Ranks that share KV heads: the lowest of them writes, the others
  // take its word.
  static absl::StatusOr<HostPages> Open(const RankCacheOptions& options, HostTier* tier,
                                        SequenceId sequence,
                                        const SequenceOptions& sequence_options);
  HostPages() = default;
  HostPages(HostPages&& other) noexcept { *this = std::move(other); }
  HostPages& operator=(HostPages&& other) noexcept;
  ~HostPages() { Close(); }

  bool writes() const { return role_ == Role::kWriter; }

  // Before positions [begin, end) are written. Reserves ahead; what does not
  // fit becomes unbacked, page by page, or (OnHostFull::kStop) RESOURCE_EXHAUSTED.
  // A tier that cannot be reached never stops a sequence.
  absl::Status Prepare(int64_t begin, int64_t end);

  // Host rows of positions [begin, end) of one layer: rows[i * num_kv_heads + h].
  void FillRows(int layer, int64_t begin, int64_t end, std::span<HostRow> rows) const;

  // Whether what this rank has written can be read here. False once the tier has
  // lost the sequence.
  bool readable() const { return writes() && !is_lost(); }
  bool has_copy(Position position) const;
  // A page of one of this rank's heads, to be read; null without a copy.
  const std::byte* Page(int layer, int head, int64_t page) const;
  // The first position without a host row: 0 when nothing is readable, the
  // largest number when all have one.
  int64_t first_unbacked() const;

  // Of a sequence that is restored, or whose prompt begins with stored pages: positions below
  // `tokens` are in the pages already,
  // and those below `known_tokens` are not written again as far as they are. DATA_LOSS
  // when the first are not.
  absl::Status TakeOver(int64_t tokens, int64_t known_tokens);
  // Of a copy that has just been opened for `tokens`: what the other's pages hold of them.
  // DATA_LOSS when they cannot be read.
  absl::Status CopyFrom(const HostPages& from, int64_t tokens);
  // A page of all layers and this rank's heads, [layer][head][page_bytes]; empty without a copy.
  std::vector<std::byte> ReadPage(int64_t page) const;
  // Likewise, the other way, pages 0, 1, ... of a sequence just opened for them. DATA_LOSS for
  // another size.
  absl::Status FillPages(std::span<const std::span<const std::byte>> pages);
  // Of one layer, for a kernel: [heads of this rank][pages]; all are there.
  std::vector<const std::byte*> AllPages(int layer) const;

  // Pages that rest, as HostTier has them; KV heads are counted over this rank's.
  int64_t BytesToRest() const { return readable() ? tier_->BytesToRest(sequence_) : 0; }
  void Rest(std::span<const PageId> pages) const { tier_->Rest(sequence_, OfModel(pages)); }
  void Ask(std::span<const PageId> pages) const { tier_->Ask(sequence_, OfModel(pages)); }
  void AwaitAsked(absl::Duration max) const { tier_->AwaitAsked(sequence_, max); }
  std::vector<PageId> TakeGone() const;

  // Every layer of positions below `tokens` is written.
  void Publish(int64_t tokens);

  // Of positions [0, tokens): those without a host row; all of them once the tier
  // has lost the sequence.
  std::vector<PositionRange> Unbacked(int64_t tokens) const;
  // What the registry may take for stored on this rank's word, of `tokens` seen:
  // nothing where it writes pages, since the page store knows what has arrived.
  int64_t Watermark(int64_t tokens) const { return writes() ? 0 : tokens; }
  int64_t reserved_bytes() const;

 private:
  enum class Role { kNoTier, kOtherRank, kWriter };

  absl::Status ReservePrompt(int64_t prompt_tokens);
  absl::Status Reserve(int64_t end_page);
  std::vector<PageId> OfModel(std::span<const PageId> pages) const;
  bool is_lost() const { return writes() && tier_->IsLost(sequence_); }
  void Close();

  Role role_ = Role::kNoTier;
  HostTier* tier_ = nullptr;
  SequenceId sequence_ = 0;
  OnHostFull on_host_full_ = OnHostFull::kStop;
  PageGeometry geometry_;
  HeadRange heads_;
  int64_t reserve_ahead_tokens_ = 0;
  int64_t max_tokens_ = 0;
  std::vector<bool> backed_;       // [pages decided so far]
  int64_t written_tokens_ = 0;     // by whoever had the pages before: not written again
  int64_t next_attempt_page_ = 0;  // after a failure: not before this page is reached
};

}  // namespace heavywater
