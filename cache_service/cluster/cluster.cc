#include "cache_service/cluster/cluster.h"

#include <algorithm>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "cache_service/base/elsewhere.h"
#include "cache_service/base/status.h"
#include "cache_service/cluster/reach.h"
#include "cache_service/runtime/logging.h"

namespace heavywater {
namespace {

// Of calls that wait for another service's sequence.
constexpr size_t kMaxWaiting = 256;
constexpr absl::Duration kReachLimit = absl::Milliseconds(300);
constexpr absl::Duration kSlotLimit = absl::Seconds(3);
constexpr absl::Duration kSlotRetry = absl::Milliseconds(100);
// For its client, which has just asked.
constexpr absl::Duration kLeastLease = absl::Seconds(60);

absl::Status Unknown(SequenceId id) {
  return absl::NotFoundError(absl::StrCat("sequence ", id, " is unknown or has ended"));
}

}  // namespace

Cluster::Cluster(const ClusterOptions& options, std::unique_ptr<EtcdClient> etcd,
                 std::unique_ptr<RemoteCopies> copies)
    : options_(options),
      etcd_(std::move(etcd)),
      copies_(std::move(copies)),
      directory_(*etcd_, options.prefix, options.service),
      members_(options.takeover, Clock::Real()),
      changes_(Clock::Real()) {}

absl::StatusOr<std::unique_ptr<Cluster>> Cluster::Create(const ClusterOptions& options) {
  HW_ASSIGN_OR_RETURN(auto etcd, EtcdClient::Create(options.etcd));
  std::unique_ptr<RemoteCopies> copies;
  if (!options.redis_address.empty()) {
    HW_ASSIGN_OR_RETURN(copies,
                        RemoteCopies::Create(options.redis_address, options.redis, Clock::Real()));
  }
  std::unique_ptr<Cluster> cluster(new Cluster(options, std::move(etcd), std::move(copies)));
  const absl::Time deadline = absl::Now() + kSlotLimit;
  absl::Status slot = cluster->TakeSlot();
  while (absl::IsUnavailable(slot) && absl::Now() < deadline) {
    absl::SleepFor(kSlotRetry);
    slot = cluster->TakeSlot();
  }
  if (absl::IsUnavailable(slot)) {
    cluster->slot_ = static_cast<int>(std::random_device()() % kMaxCacheServices);
    LogWarn("begins without etcd: others do not hear of its sequences until it is there",
            {{"reason", slot.ToString()}});
    return cluster;
  }
  HW_RETURN_IF_ERROR(slot);
  return cluster;
}

absl::Status Cluster::TakeSlot() {
  if (lease_ == 0) {
    HW_ASSIGN_OR_RETURN(lease_, etcd_->Grant(options_.lease));
  }
  HW_ASSIGN_OR_RETURN(slot_, directory_.ClaimSlot(kMaxCacheServices, lease_));
  return absl::OkStatus();
}

void Cluster::Start(const std::string& address, Registry& registry, OrderedPageStore& store,
                    Clock& clock) {
  address_ = address;
  registry_ = &registry;
  clock_ = &clock;
  if (copies_ != nullptr) {
    copier_ = std::make_unique<SequenceCopier>(*copies_, registry.sequences(), store);
  }
  PublisherOptions publisher = options_.publisher;
  publisher.address = address;
  publisher_ = std::make_unique<Publisher>(publisher, directory_, copier_.get(),
                                           registry.sequences(), changes_, clock);
  // What a restart has brought back may have been taken over meanwhile.
  for (const SequenceId id : registry.sequences().Ids()) changes_.Add(id);
  for (auto& bringer : bringers_) {
    bringer = std::make_unique<ThreadExecutor>(kMaxWaiting);
  }
  beater_ = std::thread([this] { Beat(); });
  watcher_ = std::thread([this] { WatchAll(); });
  started_ = true;
}

Cluster::~Cluster() { Stop(); }

void Cluster::Stop() {
  {
    MutexLock lock(&mutex_);
    if (std::exchange(stopping_, true)) return;
    stop_.SignalAll();
    if (watch_ != nullptr) watch_->Cancel();
  }
  if (beater_.joinable()) beater_.join();
  if (watcher_.joinable()) watcher_.join();
  for (auto& bringer : bringers_) bringer.reset();
  if (started_) publisher_->Stop();
  if (lease_ != 0) (void)etcd_->Revoke(lease_);  // or it ends by its time
}

void Cluster::Flush(absl::Duration limit) {
  if (started_) publisher_->Flush(limit);
}

Cluster::Stats Cluster::stats() const {
  Stats stats;
  {
    MutexLock lock(&mutex_);
    stats = stats_;
  }
  stats.services = members_.size();
  stats.pending = changes_.size();
  stats.lag = changes_.Age();
  if (started_) stats.published = publisher_->stats();
  return stats;
}

void Cluster::Bring(SequenceId id, const Viewer& viewer,
                    std::function<void(const absl::Status&)> done) {
  if (!started_) return done(absl::UnavailableError("the cache service starts"));
  // Calls for one sequence one after the other; the slots of services lie in the lowest digits.
  ThreadExecutor& bringer = *bringers_[id / kMaxCacheServices % bringers_.size()];
  const absl::Status queued =
      bringer.Schedule([this, id, viewer, done] { done(BringNow(id, viewer)); });
  if (!queued.ok()) {
    done(absl::UnavailableError(absl::StrCat("sequence ", id, " is not here, and ", kMaxWaiting,
                                             " calls wait to hear where theirs are")));
  }
}

absl::Status Cluster::NotHeardOf(SequenceId id, const v1::SequenceRecord& record) const {
  return absl::UnavailableError(absl::StrCat(
      "sequence ", id, " is at the cache service at ", record.address(),
      ", which is not heard of; it can be taken over in ",
      absl::FormatDuration(options_.lease + options_.takeover), " if that does not come back"));
}

absl::Status Cluster::BringNow(SequenceId id, const Viewer& viewer) {
  // Somebody else has asked for it, too.
  if (registry_->sequences().Export(id, /*with_state=*/false).has_value()) return absl::OkStatus();
  const absl::StatusOr<std::optional<HeldRecord>> found = directory_.Find(id);
  if (!found.ok()) {
    // It has ended here; another service had to be told by etcd that this one is lost to have it.
    if (registry_->sequences().IsOwnId(id)) return Unknown(id);
    return absl::UnavailableError(
        absl::StrCat("sequence ", id,
                     " is not here, and where it is cannot be asked: ", found.status().message()));
  }
  if (!found->has_value() || !viewer.Sees((*found)->record.tenant())) return Unknown(id);
  const v1::SequenceRecord& record = (*found)->record;
  if (record.owner() == options_.service) return Unknown(id);  // it has just ended
  switch (members_.Of(record.owner())) {
    case Members::Presence::kHere:
      // It may have been lost just now, and who asks has come here for that.
      if (!Listens(record.address(), kReachLimit)) return NotHeardOf(id, record);
      return ElsewhereError(absl::StrCat("sequence ", id, " is at the cache service at ",
                                         record.address(), ", not at this one"),
                            record.address());
    case Members::Presence::kUnknown:
    case Members::Presence::kMissing:
      return NotHeardOf(id, record);
    case Members::Presence::kGone:
      return TakeOver(id, **found);
  }
  return Unknown(id);
}

absl::Status Cluster::TakeOver(SequenceId id, const HeldRecord& held) {
  const v1::SequenceRecord& record = held.record;
  if (IsOver(record, absl::Now())) return Unknown(id);
  if (!record.has_copy() || copier_ == nullptr) {
    return absl::DataLossError(
        absl::StrCat("sequence ", id, " was lost with the cache service at ", record.address(),
                     record.has_copy() ? ": this one has no redis_address, where its copy is"
                                       : ": there is no copy of its pages"));
  }
  if (!publisher_->BeginMove(id)) return Unknown(id);
  absl::Status moved = Move(id, held);
  publisher_->EndMove(id);
  LogWarn("sequence of a lost cache service",
          {{"sequence", id}, {"was_at", record.address()}, {"taken_over", moved.ToString()}});
  MutexLock lock(&mutex_);
  ++(moved.ok() ? stats_.takeovers : stats_.takeovers_failed);
  return moved;
}

// First the pages and the state, then the record: a service that ends in between has lost
// nothing, and of several one wins.
absl::Status Cluster::Move(SequenceId id, const HeldRecord& held) {
  absl::StatusOr<v1::SequenceState> state = copier_->CopyIn(id, held.record.copy());
  if (absl::IsNotFound(state.status())) {
    return absl::DataLossError(absl::StrCat("sequence ", id, " was lost with the cache service at ",
                                            held.record.address(), ": ", state.status().message()));
  }
  HW_RETURN_IF_ERROR(state.status());
  v1::SequenceRecord record = held.record;
  record.set_owner(options_.service);
  record.set_address(address_);
  const absl::Duration left = absl::FromUnixMillis(record.expires_ms()) - absl::Now();
  const absl::Status imported =
      registry_->sequences().Import(id, *state, clock_->Now() + std::max(left, kLeastLease));
  if (!imported.ok()) {
    copier_->TakeOut(id);
    return imported;
  }
  const auto won = directory_.TakeOver(id, held, record);
  // Whether it is ours the publisher finds out: the answer may be what was lost.
  HW_RETURN_IF_ERROR(won.status());
  if (won->has_value()) return absl::OkStatus();
  // The record has changed: by another service, or by an earlier try of this call whose answer
  // was lost.
  HW_ASSIGN_OR_RETURN(const std::optional<HeldRecord> now, directory_.Find(id));
  if (now.has_value() && now->record.owner() == options_.service) return absl::OkStatus();
  registry_->sequences().GiveUp(id);
  return absl::UnavailableError(absl::StrCat(
      "sequence ", id, " was taken over by another cache service just now, or its own is back"));
}

}  // namespace heavywater
