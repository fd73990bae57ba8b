// A rank's host tier, as worker/server/remote_host_tier.h has it, over simulated messages
// and time: pages in the service's real slab, or streamed, or held here while the service
// is away; the fence.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>

#include "cache_service/tier/host_tier.h"
#include "cache_service/tier/slab_view.h"
#include "heavywater/v1/page_store.pb.h"
#include "tests/sim/system/sim_link.h"
#include "worker/server/remote_sequence.h"

namespace heavywater {

class SimHostTier final : public HostTier {
 public:
  SimHostTier(SimWorld& world, SimService& service, SimLink& link, int64_t reserve_ahead_tokens)
      : world_(world),
        service_(service),
        link_(link),
        reserve_ahead_tokens_(reserve_ahead_tokens) {}

  void Expect(SequenceId sequence, int64_t max_tokens, absl::Duration lease);
  void Forget(SequenceId sequence);
  absl::Status OpenSequence(SequenceId sequence, const PageGeometry& geometry,
                            HeadRange heads) override;
  absl::Status Reserve(SequenceId sequence, int64_t first_page, int64_t num_pages) override;
  void Skip(SequenceId sequence, int64_t first_page, int64_t num_pages) override;
  std::byte* Page(SequenceId sequence, int layer, int kv_head, int64_t page) override;
  void Publish(SequenceId sequence, int64_t tokens) override;
  int64_t StoredTokens(SequenceId sequence) const override;
  bool IsLost(SequenceId sequence) const override;
  void CloseSequence(SequenceId sequence) override;
  int64_t reserved_bytes() const override;

  void WhenWritten(SequenceId sequence, std::function<void()> done);
  void NoteUnknown(SequenceId sequence);
  // After each new formation.
  void AttachAgain();
  bool attached() const { return attached_epoch_ == link_.epoch() && attached_epoch_ != 0; }
  // What its thread does, some of it.
  void Poll();
  // Its process has ended: it does nothing any more.
  void Die() { dead_ = true; }
  // Its process stood still and wakes: it ends the step that it was in. Of each sequence
  // that it had it writes and publishes one more row, as far as its fence lets it.
  using Row = std::function<std::span<const std::byte>(SequenceId, int layer, int kv_head)>;
  void EndStep(const Row& row);
  // Those, and how far they were.
  std::map<SequenceId, int64_t> Published() const;

  // Where a page lies, without the fence; null: nowhere.
  const std::byte* Peek(SequenceId sequence, int layer, int kv_head, int64_t page) const;

 private:
  struct Entry {
    std::unique_ptr<RemoteSequence> sequence;  // null before OpenSequence()
    int64_t max_tokens = 0;
    absl::Duration lease = absl::ZeroDuration();
    int64_t wanted_pages = 0;
    absl::Status refused;
    bool orphan = false;
    bool listed = false;
    bool unknown = false;
    bool in_flight = false;  // a call about it
    absl::Time next_try = absl::InfinitePast();
    absl::Time closed = absl::InfiniteFuture();
    std::function<void()> when_written;
    uint64_t number = 0;  // tells it from a later one of the same sequence

    bool closing() const { return closed != absl::InfiniteFuture(); }
  };

  Entry* FindOpen(SequenceId sequence);
  Entry* Find(SequenceId sequence, uint64_t number);
  bool IsFenced(const Entry& entry) const;
  bool MayNotWrite(Entry& entry);
  void MakeOrphan(Entry& entry);
  void StopListing(Entry& entry);
  void NoteFailure(Entry& entry, const absl::Status& status);
  bool HasEnded(const Entry& entry) const;
  void EraseEnded();
  int64_t TargetPages(const Entry& entry) const;
  void Sync(Entry& entry);
  v1::ReserveRequest ReserveRequestOf(const RemoteSequence& sequence,
                                      RemoteSequence::PageSpan span) const;
  absl::Status TakeGrant(Entry& entry, RemoteSequence::PageSpan span, Epoch epoch, absl::Time sent,
                         const absl::StatusOr<v1::ReserveResponse>& granted);
  absl::Status ReserveNow(Entry& entry, int64_t end_page);
  void SendGrant(Entry& entry, RemoteSequence::PageSpan span);
  void SendSkip(Entry& entry, RemoteSequence::PageSpan span);
  void Push(Entry& entry);

  SimWorld& world_;
  SimService& service_;
  SimLink& link_;
  const int64_t reserve_ahead_tokens_;
  bool dead_ = false;
  std::map<SequenceId, Entry> entries_;
  std::shared_ptr<SlabView> slab_;
  uint64_t slab_nonce_ = 0;
  Epoch attached_epoch_ = 0;
  uint64_t next_number_ = 1;
};

}  // namespace heavywater
