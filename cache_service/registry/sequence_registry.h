// All sequences: ids, leases, and what their ranks report.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "cache_service/base/clock.h"
#include "cache_service/base/ids.h"
#include "cache_service/base/mutex.h"
#include "cache_service/base/viewer.h"
#include "cache_service/registry/pin_book.h"
#include "cache_service/registry/plan_state.h"
#include "cache_service/registry/prefix_index.h"
#include "cache_service/registry/registry_options.h"
#include "cache_service/tier/page_store.h"
#include "cache_service/tier/state_store.h"
#include "heavywater/v1/admin.pb.h"
#include "heavywater/v1/cache_state.pb.h"
#include "heavywater/v1/group.pb.h"
#include "heavywater/v1/sequence.pb.h"

namespace heavywater {

// Thread safe. Pages of a sequence exist in the store exactly while it is here.
class SequenceRegistry {
 public:
  // The store, the clock and the state (where it keeps what a restart needs; may be
  // null) must outlive it.
  SequenceRegistry(const RegistryOptions& options, PageStore& store, Clock& clock,
                   StateStore* state = nullptr);

  // After a restart, before anything else: goes on with those of the kept sequences
  // whose pages are `stored`; leases begin anew. The others of `stored` end. DATA_LOSS.
  absl::Status Restore(const std::vector<SequenceId>& stored);

  // The request has been checked against its group, which has `num_ranks`.
  // `may_share`: its ranks can read pages of others where they lie.
  absl::StatusOr<v1::OpenSequenceResponse> Open(const v1::OpenSequenceRequest& request,
                                                int num_ranks, bool may_share = true);
  // Whether Open() is likely to wait for the tiers below: the prompt may begin with pages there.
  bool OpenMayWait(const v1::OpenSequenceRequest& request);
  // What `viewer` may not see is NOT_FOUND, in the words for a sequence that never was.
  // With the tokens from `first_token` on that fit into a message.
  absl::StatusOr<v1::Sequence> Get(SequenceId id, int64_t first_token = 0,
                                   const Viewer& viewer = Viewer::All());
  absl::StatusOr<v1::ListSequencesResponse> List(const v1::ListSequencesRequest& request,
                                                 const Viewer& viewer = Viewer::All());
  absl::Status Close(const v1::CloseSequenceRequest& request, const Viewer& viewer = Viewer::All());
  absl::StatusOr<std::vector<v1::SequenceSet>> GetSets(const v1::GetSetsRequest& request,
                                                       const Viewer& viewer = Viewer::All());

  // The group has been checked; `since` has the epoch in which each rank's process joined it.
  // ABORTED: the incarnation is not `incarnation` any more, or of a later epoch. As
  // SequenceService says.
  absl::StatusOr<v1::ReopenSequenceResponse> Reopen(const v1::ReopenSequenceRequest& request,
                                                    std::span<const Epoch> since,
                                                    int32_t incarnation);
  // As SequenceService says. (sequence_suspend.cc)
  absl::StatusOr<v1::SuspendSequenceResponse> Suspend(const v1::SuspendSequenceRequest& request,
                                                      const Viewer& viewer = Viewer::All());
  absl::StatusOr<v1::ResumeSequenceResponse> Resume(const v1::ResumeSequenceRequest& request,
                                                    const Viewer& viewer = Viewer::All());
  absl::StatusOr<v1::TruncateSequenceResponse> Truncate(const v1::TruncateSequenceRequest& request,
                                                        const Viewer& viewer = Viewer::All());
  // As SequenceService says. (sequence_fork.cc)
  absl::StatusOr<v1::ForkSequenceResponse> Fork(const v1::ForkSequenceRequest& request,
                                                const Viewer& viewer = Viewer::All());
  // Those among them that are suspended.
  void AddSuspended(const google::protobuf::RepeatedField<uint64_t>& ids,
                    google::protobuf::RepeatedField<uint64_t>* suspended) const;
  absl::StatusOr<v1::ReadSnapshotResponse> ReadSnapshot(const v1::ReadSnapshotRequest& request);

  // Renews the leases of the group's sequences among these; adds the others to
  // `unknown`. FAILED_PRECONDITION when ranks have disagreed about one of them
  // (its lease is renewed nevertheless).
  absl::Status Renew(const std::string& group, const google::protobuf::RepeatedField<uint64_t>& ids,
                     google::protobuf::RepeatedField<uint64_t>* unknown);

  // All reports or none: INVALID_ARGUMENT changes nothing. Sequences that are
  // gone are added to `unknown`. FAILED_PRECONDITION when ranks disagree; all
  // reports are taken nevertheless.
  absl::Status Report(const v1::ReportPlanRequest& request,
                      google::protobuf::RepeatedField<uint64_t>* unknown);

  // Whether the sequence was not reopened since. False for unknown ones.
  bool IsCurrent(SequenceId id, int32_t incarnation) const;
  // Until when, by their own clocks, processes may write to it that had it before it was
  // reopened and joined their group before `since`. The past: none, or it is unknown.
  absl::Time EarlierWriteEnd(SequenceId id, Epoch since) const;
  absl::Time WriteEnd(SequenceId id) const;  // likewise of all that have it or had it
  // Until when, by their own clocks, the ranks of each sequence may write to it.
  std::vector<std::pair<SequenceId, absl::Time>> WriteEnds() const;
  // Of a sequence that goes on: whose last word was that they write no more.
  struct FinishedRank {
    SequenceId id = 0;
    int rank = 0;
    int32_t incarnation = 0;
    absl::Time write_end;  // of whoever may be writing nevertheless
  };
  std::vector<FinishedRank> FinishedRanks() const;
  bool HasFinished(SequenceId id, int rank) const;

  // The store's watermark of the sequence has risen: a plan that waits for it may
  // be committed now. (Of ranks that write in the slab Tick() and readers find out.)
  void NoteCommit(SequenceId id);

  // What handlers of pages need to know. NOT_FOUND.
  struct Owner {
    std::string group;
    v1::Fingerprint fingerprint;
    int32_t incarnation = 0;
    bool stopped = false;  // its ranks may not write before it is reopened
  };
  absl::StatusOr<Owner> FindOwner(SequenceId id, const Viewer& viewer = Viewer::All()) const;
  // Renews the lease, if the sequence is there.
  void RenewOne(SequenceId id);
  // Somebody reads it: it is ended later than others when room is needed.
  void NoteUse(SequenceId id);

  // `full`: how the store refused something (RESOURCE_EXHAUSTED). Moves pages of
  // finished sequences to the tiers below; where those have no room either, ends
  // finished sequences, the longest unused first, as far as that helps. OK when it is
  // worth another try. Otherwise nothing is ended, and the result is `full` with what
  // holds the room.
  absl::Status MakeRoom(const absl::Status& full, SequenceId spared = 0);
  // As PageStore::BringUp(), with such room made. Waits for the tiers below.
  absl::Status BringUp(SequenceId id);
  // So that a change of its bytes shows when it goes on. Reads all of them.
  void SealPages(SequenceId id) { (void)store_.PrepareShare(id, kAllTokens - 1, /*exact=*/false); }

  // As AdminService says. (sequence_pins.cc)
  absl::StatusOr<v1::PinResponse> Pin(const v1::PinRequest& request);
  struct Pinned {
    int64_t pins = 0;
    int64_t sequences = 0;
    int64_t host_bytes = 0;
  };
  Pinned CountPinned() const;
  // Pins whose deadline has come since the last call, as far as kMaxEndedPins.
  std::vector<heavywater::Pin> TakeEndedPins();
  // Neither finished nor suspended.
  std::vector<SequenceId> Running() const;
  // Every sequence's state as one record.
  struct Written {
    int64_t sequences = 0;
    int64_t bytes = 0;
  };
  Written SaveAll();

  // Ends leases that are over and moves committed plans on. Returns the sequences
  // that it ended.
  std::vector<SequenceId> Tick();

  // Ended sequences since the last call, for whoever tracks their writers.
  struct Ended {
    SequenceId id = 0;
    std::string group;
    Epoch epoch = 0;  // in which it was opened
    int num_ranks = 0;
    absl::Time write_end;  // as leases were given: a rank that is cut off may write until then
    absl::Duration lease = absl::ZeroDuration();
    int32_t incarnation = 0;
  };
  std::vector<Ended> TakeEnded();

  // --- From one cache service to another --- (sequence_move.cc)
  struct Exported {
    std::string group;
    std::string tenant;
    std::string request_id;
    int32_t incarnation = 0;
    int64_t num_tokens = 0;
    bool suspended = false;
    bool finished = false;         // by all ranks: nobody writes to it
    bool can_go_on = false;        // has a committed state
    absl::Time lease_end;          // or of the last of its pins
    v1::SequenceState state = {};  // where it was asked for
  };
  std::optional<Exported> Export(SequenceId id, bool with_state);
  std::vector<SequenceId> Ids() const;
  // Whether this process gave out the id.
  bool IsOwnId(SequenceId id) const;
  // Its pages are in the store. ALREADY_EXISTS, DATA_LOSS: nothing has changed.
  absl::Status Import(SequenceId id, const v1::SequenceState& state, absl::Time lease_end);
  // Another service has it now: it ends here. False: it is not here.
  bool GiveUp(SequenceId id);

  int64_t num_sequences() const;
  int64_t num_reports() const;
  int64_t num_disagreements() const;
  int64_t num_reclaimed() const;  // ended to make room
  int64_t snapshot_bytes() const;
  // Of prompts that asked for stored prefixes.
  struct PrefixStats {
    int64_t lookups = 0;
    int64_t hits = 0;
    int64_t tokens = 0;         // that they began with
    int64_t indexed_pages = 0;  // whole pages of prompts that can be found
  };
  PrefixStats prefix_stats() const;

 private:
  struct Record {
    Record(const v1::OpenSequenceRequest& request, const PlanLayout& layout)
        : request(request), num_ranks(layout.num_ranks), plans(layout) {}
    v1::OpenSequenceRequest request;
    int num_ranks;
    absl::Duration lease;
    absl::Time lease_end;
    // Until when ranks that hear nothing more may write by their own clocks: as long as a
    // lease from the last call that gave it anew. (A suspended one's lease is longer.)
    absl::Time write_end;
    // Likewise of those that had it before it was reopened, by the epoch in which they got
    // it: one of each formation, while that time is not over.
    std::map<Epoch, absl::Time> earlier_write_ends;
    // Its ranks were not heard of for as long as they may write: it goes on only where it is
    // reopened.
    bool stopped = false;
    Epoch epoch = 0;         // in which it was opened or reopened last
    absl::Time last_use;     // its ranks' last report, or somebody's last read
    absl::Time last_listed;  // by a rank that has it open
    PlanState plans;
    bool disagreement_counted = false;
    int32_t incarnation = 0;
    absl::Duration suspended = absl::ZeroDuration();  // for how long; zero: it is not
    v1::ForkState fork;                               // empty: it was opened
    // Of what is kept of it: the whole record, and the reports since.
    int64_t record_bytes = 0;
    int64_t report_bytes = 0;
    uint64_t num_reports = 0;
  };
  using Records = std::map<SequenceId, Record>;

  // Of an Open, remembered for a while after the sequence has ended.
  struct FirstAnswer {
    size_t request_hash;
    v1::OpenSequenceResponse response;
  };

  // Of a Fork, likewise.
  struct ForkAnswer {
    std::string tenant;
    int64_t asked_lease_ms = 0;
    v1::ForkSequenceResponse response;
  };

  // Stored pages with which a prompt may begin.
  struct Prefix {
    SequenceId source = 0;
    int64_t tokens = 0;  // 0: none
  };

  // Written to its end by all ranks.
  struct Finished {
    absl::Time last_use;
    SequenceId id = 0;
    int64_t bytes = 0;  // in all tiers
    int64_t host_bytes = 0;
  };

  static constexpr size_t kMaxEndedPins = 1024;

  // The longest unused first; those that nobody has pinned or suspended. Null: of every tenant.
  std::vector<Finished> FinishedSequences(const std::string* tenant = nullptr,
                                          SequenceId spared = 0)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Reclaim(SequenceId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status EndFinishedOf(const TenantShortage& tenant, const absl::Status& full,
                             SequenceId spared) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  std::vector<SequenceId> ThoseThatHelp(const std::vector<Finished>& finished, int64_t missing)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status EndFinished(const absl::Status& full, SequenceId spared)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Open() as far as it goes without more room in the store, which is `store_full` then.
  absl::StatusOr<v1::OpenSequenceResponse> TryOpen(const v1::OpenSequenceRequest& request,
                                                   int num_ranks, const PageGeometry& geometry,
                                                   const Prefix& prefix, absl::Status* store_full)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // --- Stored prefixes --- (sequence_prefix.cc)
  static absl::Status CheckPrefix(const v1::OpenSequenceRequest& request);
  Prefix FindPrefix(const v1::OpenSequenceRequest& request);
  std::vector<Prefix> PrefixCandidates(const v1::OpenSequenceRequest& request);
  // The sequence's pages; how many of its tokens are stored in them already.
  absl::StatusOr<int64_t> OpenPages(const SequenceSpec& spec, const Prefix& prefix);
  void CountPrefix(const v1::OpenSequenceRequest& request, int64_t tokens)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Once its prompt is known, others can find it.
  void OfferPrefix(SequenceId id, const Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // --- Forks --- (sequence_fork.cc)
  absl::StatusOr<v1::ForkSequenceResponse> TryFork(const v1::ForkSequenceRequest& request,
                                                   const Viewer& viewer, bool prepared,
                                                   absl::Status* store_full)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<std::optional<v1::ForkSequenceResponse>> ForkReplay(
      const v1::ForkSequenceRequest& request, const Viewer& viewer) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckFork(SequenceId id, const Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<SequenceId> InTheWayOfFork(SequenceId parent)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<int64_t> ForkPages(SequenceId parent, const Record& record, SequenceId child,
                                    absl::Status* store_full) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::ForkSequenceResponse AddFork(const v1::ForkSequenceRequest& request, const Record& parent,
                                   v1::ForkSequenceResponse response)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RememberFork(const Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // `full` and who holds the room.
  absl::Status NameHolders(const absl::Status& full, const std::vector<Finished>& finished)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether one more has a place, or would once a finished one has ended.
  absl::Status CheckCount() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BoundCount() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);  // ends that one
  absl::Status Unknown(SequenceId id, const Viewer& viewer) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Records::iterator> Find(SequenceId id, const Viewer& viewer = Viewer::All())
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<v1::OpenSequenceResponse> Replay(const v1::OpenSequenceRequest& request,
                                                  const FirstAnswer& first) const;
  // --- What a restart needs --- (sequence_registry_state.cc)
  PlanLayout LayoutOf(SequenceId id, const v1::OpenSequenceRequest& request, int num_ranks) const;
  Record& AddRecord(SequenceId id, const v1::OpenSequenceRequest& request, int num_ranks,
                    absl::Duration lease) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  SequenceId NextId() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteChange(SequenceId id) const {
    if (options_.on_change) options_.on_change(id);
  }
  // Each before anybody is answered. The whole of a sequence takes the place of its reports.
  static v1::SequenceState RecordOf(const Record& record);
  void Save(SequenceId id, Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SaveReport(SequenceId id, Record& record, int rank, const v1::PlanReport& report)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Before its pages are released.
  void SaveEnd(SequenceId id, const Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void SaveClosed(SequenceId id, const std::string& request_id)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LoadSequence(SequenceId id, std::string_view value)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LoadReport(SequenceId id, std::string_view value)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Records::iterator End(Records::iterator record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckReopen(const v1::ReopenSequenceRequest& request, int num_ranks, SequenceId id,
                           const Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Of all that have had it.
  static absl::Time WriteEndOf(const Record& record);
  void StopSilent(SequenceId id, Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Advance(SequenceId id, Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Host memory of what is suspended or pinned, with one more sequence.
  int64_t KeptBytes(SequenceId with) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status CheckKept(SequenceId id, const char* what) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Tells the store, and keeps them.
  void PinsChanged(SequenceId id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndPins(absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status LoadPins() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Whether ranks may have it open: they have not all finished, and were heard of lately.
  bool MayRun(const Record& record) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The state that was taken first, of sequences that nobody has suspended if there are any.
  PlanState* OldestSnapshots() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Ranks that go on with another process share nothing with the one before that may write.
  absl::Status ContestReplaced(SequenceId id, const Record& record, std::span<const Epoch> since,
                               int64_t tokens) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void NoteReopened(const v1::ReopenSequenceRequest& request, Record& record)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Never shortens what is left of it.
  void RenewLease(Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BoundSnapshots() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::Sequence Describe(SequenceId id, Record& record) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::Status ValidateReports(const v1::ReportPlanRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const RegistryOptions options_;
  PageStore& store_;
  Clock& clock_;
  // Of all records.
  const std::shared_ptr<std::atomic<int64_t>> snapshot_bytes_ =
      std::make_shared<std::atomic<int64_t>>(0);
  StateStore* const state_;
  mutable Mutex mutex_;
  SequenceId next_id_ ABSL_GUARDED_BY(mutex_);
  Records records_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<std::string, FirstAnswer> first_answers_ ABSL_GUARDED_BY(mutex_);
  // Request ids of ended sequences, oldest first: the next to be forgotten.
  std::deque<std::string> ended_requests_ ABSL_GUARDED_BY(mutex_);
  // Request ids of Close, by sequence, likewise.
  std::map<SequenceId, std::string> closed_ ABSL_GUARDED_BY(mutex_);
  // Of Fork, by sequence and request id; those of the oldest sequences are forgotten first.
  std::map<std::pair<SequenceId, std::string>, ForkAnswer> forks_ ABSL_GUARDED_BY(mutex_);
  PrefixIndex prefixes_ ABSL_GUARDED_BY(mutex_);
  PrefixStats prefix_stats_ ABSL_GUARDED_BY(mutex_);
  std::vector<Ended> ended_ ABSL_GUARDED_BY(mutex_);
  PinBook pins_ ABSL_GUARDED_BY(mutex_);
  std::vector<heavywater::Pin> ended_pins_ ABSL_GUARDED_BY(mutex_);
  // The last ones, and their tenants.
  std::map<SequenceId, std::string> reclaimed_ ABSL_GUARDED_BY(mutex_);
  int64_t num_reclaimed_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t num_advances_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t num_reports_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t num_disagreements_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace heavywater
