// The host tier of a rank whose cache service is another process. Pages lie in
// the service's shared memory when it can be mapped (same node), else in this
// process, from where they are streamed behind the step. When the service is
// away and the pages reserved ahead run out, this process holds them, too, and
// hands them over when it is back.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "cache_service/base/mutex.h"
#include "cache_service/tier/host_tier.h"
#include "cache_service/tier/slab_view.h"
#include "worker/server/cache_link.h"
#include "worker/server/page_client.h"
#include "worker/server/remote_sequence.h"
#include "worker/server/rest_requests.h"

namespace heavywater {

struct RemoteHostTierOptions {
  bool disable_slab = false;
  int64_t reserve_ahead_tokens = 1024;
  // Of this process, for pages that the service has no place for yet.
  int64_t max_local_bytes = int64_t{2} << 30;
  // Reaches the pages' memory, which is registered with it; outlives the tier. Null:
  // none that needs to know.
  Backend* backend = nullptr;
  // How long a step waits for pages before this process holds them. Prompts and
  // outages only: else pages are there before they are asked for.
  absl::Duration reserve_timeout = absl::Seconds(1);
};

// HostTier's calls come from the thread of the step; the service is called on a
// thread of its own.
class RemoteHostTier final : public HostTier {
 public:
  // The link must have joined and outlive this.
  RemoteHostTier(CacheLink& link, RemoteHostTierOptions options);
  ~RemoteHostTier() override;

  // Before OpenSequence(): pages are reserved ahead up to so many tokens; `lease`
  // is the sequence's at the service. For a sequence that was not opened after
  // all, Forget(). Waits for the end of one of the same id that was closed just now:
  // its last rows, at most kCloseWait.
  void Expect(SequenceId sequence, int64_t max_tokens, absl::Duration lease);
  void Forget(SequenceId sequence);
  absl::Status OpenSequence(SequenceId sequence, const PageGeometry& geometry,
                            HeadRange heads) override;
  absl::Status Reserve(SequenceId sequence, int64_t first_page, int64_t num_pages) override;
  void Skip(SequenceId sequence, int64_t first_page, int64_t num_pages) override;
  std::byte* Page(SequenceId sequence, int layer, int kv_head, int64_t page) override;
  void Publish(SequenceId sequence, int64_t tokens) override;
  // Where the pages lie in the slab: those that are streamed are not read back.
  int64_t StoredTokens(SequenceId sequence) const override;
  bool IsLost(SequenceId sequence) const override;
  void CloseSequence(SequenceId sequence) override;
  int64_t reserved_bytes() const override;
  // Pages that lie in the slab, where the service says that its memory is short
  // (remote_host_tier_rest.cc).
  int64_t BytesToRest(SequenceId sequence) override;
  void Rest(SequenceId sequence, std::span<const PageId> pages) override;
  void Ask(SequenceId sequence, std::span<const PageId> pages) override;
  void AwaitAsked(SequenceId sequence, absl::Duration max) override;
  std::vector<PageId> TakeGone(SequenceId sequence) override;

  // `done` runs once nothing of the closed sequence is left to write; at once
  // where nothing is, else on the thread that writes.
  void WhenWritten(SequenceId sequence, std::function<void()> done);

  // Waits until everything published has reached the service; false when it
  // takes longer.
  bool Flush(absl::Duration timeout);
  bool uses_slab() const;

 private:
  struct Entry {
    std::unique_ptr<RemoteSequence> sequence;  // null before OpenSequence()
    int64_t max_tokens = 0;
    absl::Duration lease;                        // none: nothing may be written to the slab
    int64_t wanted_pages = 0;                    // asked for by the rank
    absl::Status refused;                        // why the wanted pages did not come
    bool orphan = false;                         // its pages are not ours to write any more
    bool listed = false;                         // in heartbeats
    bool unknown = false;                        // to the service
    bool writing = false;                        // the step has rows in the slab to write
    bool copying = false;                        // the sync thread likewise
    absl::Time next_try = absl::InfinitePast();  // after a failure
    absl::Time closed = absl::InfiniteFuture();
    RestRequests rest;
    absl::Time next_rest = absl::InfinitePast();  // next_try of these
    std::function<void()> when_written;

    bool closing() const { return closed != absl::InfiniteFuture(); }
  };
  using Entries = std::map<SequenceId, Entry>;

  // The step's side.
  Entry* FindOpen(SequenceId sequence) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WaitForPages(Entry& entry, int64_t end_page) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool IsFenced(const Entry& entry) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True when the pages may not be written: makes a fenced entry an orphan.
  bool MayNotWrite(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status HoldLocally(Entry& entry, int64_t end_page) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  // The sync thread's (remote_host_tier_sync.cc). Entries that it works on
  // without the lock stay: only it erases.
  void Run();
  void AttachAgain();
  absl::StatusOr<std::shared_ptr<SlabView>> MapSlab(const v1::AttachResponse& attached) const;
  std::vector<SequenceId> OpenEntries();
  // One entry's next grant and next push.
  void Sync(SequenceId sequence);
  void Grant(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status GrantUpTo(Entry& entry, int64_t end_page) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Push(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of pages that rest; false: something is to be tried again.
  void SyncRest(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Tell(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool AskService(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool Return(Entry& entry, const PageId& page, int64_t offset)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  int64_t TargetPages(const Entry& entry) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasWork(const Entry& entry) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteFailure(Entry& entry, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns what to call without the lock.
  std::vector<std::function<void()>> EraseEnded() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasEnded(const Entry& entry) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteUnknown(SequenceId sequence);
  void MakeOrphan(Entry& entry, const std::string& why) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of an orphan, as soon as no write to its pages is under way.
  void StopListing(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  CacheLink& link_;
  PageClient client_;
  const RemoteHostTierOptions options_;

  mutable Mutex mutex_;
  CondVar work_;     // for the sync thread
  CondVar changed_;  // for Reserve() and Flush()
  Entries entries_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<SlabView> slab_ ABSL_GUARDED_BY(mutex_);
  uint64_t slab_nonce_ ABSL_GUARDED_BY(mutex_) = 0;
  Epoch attached_epoch_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t asks_answered_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t asks_seen_ ABSL_GUARDED_BY(mutex_) = 0;  // by the step
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace heavywater
