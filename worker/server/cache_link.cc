#include "worker/server/cache_link.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "cache_service/runtime/grpc_status.h"
#include "cache_service/runtime/logging.h"
#include "worker/server/backoff.h"

namespace heavywater {
namespace {

constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(2);
// Of one try to form again: so often it is known anew who is missing.
constexpr absl::Duration kRejoinTimeout = absl::Seconds(1);
// Of a look at another service, and of its answer.
constexpr absl::Duration kLookTimeout = absl::Seconds(1);
constexpr absl::Duration kLookGrace = absl::Milliseconds(500);
// Of a look at all others while home answers: the next one goes on where it ended.
constexpr absl::Duration kLookAround = absl::Seconds(10);
// Of a process that has just begun, at its home: the others may have gone elsewhere before.
constexpr absl::Duration kFirstPatience = absl::Seconds(3);
constexpr absl::Duration kJoinGrace = absl::Seconds(2);
constexpr absl::Duration kConnectTimeout = absl::Seconds(1);

std::shared_ptr<grpc::Channel> ChannelOf(const CacheAddress& service) {
  if (service.channel != nullptr) return service.channel;
  return grpc::CreateCustomChannel(service.address, grpc::InsecureChannelCredentials(),
                                   CacheChannelArguments());
}

std::vector<std::shared_ptr<const ServiceStubs>> ServicesOf(const CacheLinkOptions& options) {
  HW_CHECK(!options.services.empty());
  std::vector<std::shared_ptr<const ServiceStubs>> services;
  for (const CacheAddress& service : options.services) {
    services.push_back(std::make_shared<ServiceStubs>(service.address, ChannelOf(service)));
  }
  return services;
}

// Whether a call that ended so has reached the service: that ranks are missing is an answer.
bool Answered(const absl::Status& status) {
  return !ServiceIsAway(status) || absl::StrContains(status.message(), "missing ranks");
}

bool WorthAnotherTry(const absl::Status& status) {
  return ServiceIsAway(status) || absl::IsAborted(status);
}

}  // namespace

grpc::ChannelArguments CacheChannelArguments() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // Behind a cut link TCP asks more and more rarely whether it is back: a new connection is
  // there sooner.
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 5000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5000);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // Several workers of one process (tests) must not share a connection.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return arguments;
}

// CANCELLED: a service that stops ends its calls so.
bool ServiceIsAway(const absl::Status& status) {
  return absl::IsUnavailable(status) || absl::IsDeadlineExceeded(status) ||
         absl::IsCancelled(status);
}

CacheLink::CacheLink(CacheLinkOptions options)
    : options_(std::move(options)),
      services_(ServicesOf(options_)),
      choice_(static_cast<int>(services_.size()), options_.failover) {}

CacheLink::~CacheLink() { StopHeartbeats(); }

absl::Status CacheLink::Join(StopFlag& stop) {
  Backoff backoff(absl::Milliseconds(200), absl::Seconds(2));
  {
    MutexLock lock(&mutex_);
    choice_.BeginWaiting(absl::Now(), kFirstPatience);
  }
  while (!stop.stopped()) {
    const absl::Status joined = JoinSomewhere(options_.join_timeout, /*failed=*/0, stop);
    if (joined.ok() || !WorthAnotherTry(joined)) return joined;
    LogWarn(
        "joining the group failed; trying again",
        {{"group", options_.group}, {"cache", service()->address}, {"error", joined.ToString()}});
    if (stop.WaitFor(backoff.Next())) break;
  }
  return absl::CancelledError("stopped while joining the group");
}

absl::Status CacheLink::Rejoin(Epoch failed, absl::Duration limit, StopFlag& stop) {
  StopHeartbeats();
  Backoff backoff(absl::Milliseconds(100), absl::Seconds(1));
  const absl::Time deadline = absl::Now() + limit;
  {
    MutexLock lock(&mutex_);
    choice_.BeginWaiting(absl::Now());
  }
  absl::Status joined;
  do {
    joined = JoinSomewhere(kRejoinTimeout, failed, stop);
    if (joined.ok()) {
      StartHeartbeats();
      return joined;
    }
    if (!WorthAnotherTry(joined)) return joined;
    // Ranks that are missing are waited for in Join itself, without a gap in which the
    // others would not find this one.
    if (!absl::IsDeadlineExceeded(joined) && stop.WaitFor(backoff.Next())) break;
  } while (!stop.stopped() && absl::Now() < deadline);
  if (stop.stopped()) return absl::CancelledError("stopped while the group forms again");
  return absl::DeadlineExceededError(absl::StrCat("the group has not formed again within ",
                                                  absl::FormatDuration(limit), ": ",
                                                  joined.message()));
}

void CacheLink::StopHeartbeats() {
  stop_->Stop();
  {
    MutexLock lock(&mutex_);
    if (joining_ != nullptr) joining_->TryCancel();
  }
  if (thread_.joinable()) thread_.join();
}

std::string CacheLink::waiting_for() const {
  MutexLock lock(&mutex_);
  return waiting_for_;
}

absl::Status CacheLink::JoinSomewhere(absl::Duration timeout, Epoch failed, StopFlag& stop) {
  absl::Duration until_look;
  {
    MutexLock lock(&mutex_);
    until_look = choice_.UntilLook(absl::Now());
  }
  const absl::Status joined =
      JoinHome(std::clamp(until_look, std::min(timeout, kLookTimeout), timeout), failed);
  if (joined.ok() || !WorthAnotherTry(joined) || stop.stopped()) return joined;
  {
    MutexLock lock(&mutex_);
    if (!choice_.LooksElsewhere(absl::Now())) return joined;
  }
  return LookElsewhere(failed, stop).ok() ? absl::OkStatus() : joined;
}

absl::Status CacheLink::LookElsewhere(Epoch failed, StopFlag& stop) {
  const absl::Time start = absl::Now();
  std::vector<int> others;
  bool home_is_lost;
  {
    MutexLock lock(&mutex_);
    others = choice_.Others(start);
    home_is_lost = choice_.HomeIsLost(start);
  }
  int first_answered = -1;
  int last = others.back();
  for (const int other : others) {
    if (stop.stopped()) return absl::CancelledError("stopped while looking for the group");
    const ServiceStubs& service = *services_[static_cast<size_t>(other)];
    const auto joined = JoinAt(service, kLookTimeout, kLookGrace, failed);
    if (joined.ok()) {
      NoteFormed(other, *joined);
      return absl::OkStatus();
    }
    if (first_answered < 0 && Answered(joined.status())) first_answered = other;
    last = other;
    if (!home_is_lost && absl::Now() - start > kLookAround) break;
  }
  MutexLock lock(&mutex_);
  choice_.NoteLooked(first_answered, last, absl::Now());
  return absl::UnavailableError("the group forms nowhere else");
}

absl::Status CacheLink::JoinHome(absl::Duration timeout, Epoch failed) {
  const auto home = [this] {
    MutexLock lock(&mutex_);
    return choice_.home();
  }();
  const auto joined = JoinAt(*services_[static_cast<size_t>(home)], timeout, kJoinGrace, failed);
  if (joined.ok()) {
    NoteFormed(home, *joined);
    return absl::OkStatus();
  }
  MutexLock lock(&mutex_);
  up_ = Answered(joined.status());
  choice_.NoteHome(up_, absl::Now());
  return joined.status();
}

absl::StatusOr<v1::JoinResponse> CacheLink::JoinAt(const ServiceStubs& service,
                                                   absl::Duration timeout, absl::Duration grace,
                                                   Epoch failed) {
  v1::JoinRequest request;
  request.set_failed_epoch(failed);
  request.set_group(options_.group);
  request.set_rank(options_.rank);
  request.set_size(options_.size);
  request.set_instance(options_.instance);
  *request.mutable_fingerprint() = options_.fingerprint;
  request.set_config_digest(options_.config_digest);
  request.set_advertised_address(options_.advertised_address);
  request.set_timeout_ms(absl::ToInt64Milliseconds(timeout));
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + timeout + grace));
  {
    MutexLock lock(&mutex_);
    joining_ = &context;
  }
  v1::JoinResponse response;
  const absl::Status status = FromGrpcStatus(service.group->Join(&context, request, &response));
  MutexLock lock(&mutex_);
  joining_ = nullptr;
  waiting_for_ = std::string(status.message());
  if (!status.ok()) return status;
  return response;
}

void CacheLink::NoteFormed(int service, const v1::JoinResponse& response) {
  MutexLock lock(&mutex_);
  if (service != choice_.home()) {
    LogWarn(
        "the group goes on at another cache service",
        {{"group", options_.group}, {"cache", services_[static_cast<size_t>(service)]->address}});
  }
  choice_.Settle(service, absl::Now());
  up_ = true;
  epoch_ = response.epoch();
  answered_number_ = 0;
  addresses_.assign(response.addresses().begin(), response.addresses().end());
  if (response.heartbeat_interval_ms() > 0) {
    interval_ = absl::Milliseconds(response.heartbeat_interval_ms());
  }
}

std::shared_ptr<const ServiceStubs> CacheLink::service() const {
  MutexLock lock(&mutex_);
  return services_[static_cast<size_t>(choice_.home())];
}

void CacheLink::StartHeartbeats() {
  stop_ = std::make_unique<StopFlag>();
  thread_ = std::thread([this] { Run(); });
}

void CacheLink::Run() {
  Backoff backoff(absl::Milliseconds(100), absl::Seconds(1));
  bool answered = true;
  absl::Duration delay = absl::ZeroDuration();
  while (!stop_->WaitFor(delay)) {
    absl::Status status = Heartbeat();
    // A restarted service does not know the group: the ranks meet there again.
    // Running sequences go on either way; only new ones need the new epoch.
    if (absl::IsAborted(status) || absl::IsNotFound(status)) {
      status = JoinHome(absl::Seconds(5));
    }
    if (stop_->stopped()) return;
    if (up() != answered) {
      LogWarn(up() ? "cache service is back" : "cache service does not answer",
              {{"cache", service()->address}, {"status", status.ToString()}});
    } else if (answered && !status.ok()) {
      LogError("heartbeat refused", {{"error", status.ToString()}});
    }
    answered = up();
    if (answered) backoff.Reset();
    LookForAnother();
    MutexLock lock(&mutex_);
    delay = answered ? interval_ : backoff.Next();
  }
}

HostPressureNews CacheLink::host_pressure() const {
  MutexLock lock(&mutex_);
  return pressure_;
}

absl::Status CacheLink::Heartbeat() {
  v1::HeartbeatRequest request;
  request.set_group(options_.group);
  request.set_rank(options_.rank);
  // Before the request can reach the service, so that the lease that it renews
  // there ends later than what is counted from here.
  const absl::Time sent = clock().Now();
  {
    MutexLock lock(&mutex_);
    request.set_epoch(epoch_);
    request.set_answered_number(answered_number_);
    for (const auto& [sequence, listed] : sequences_) request.add_sequence_ids(sequence);
  }
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + kHeartbeatTimeout));
  v1::HeartbeatResponse response;
  const absl::Status status =
      FromGrpcStatus(service()->group->Heartbeat(&context, request, &response));
  Note(status);
  // FAILED_PRECONDITION: ranks have disagreed about a plan; all leases are renewed
  // nevertheless.
  if (status.ok() || absl::IsFailedPrecondition(status)) {
    const std::set<SequenceId> unknown(response.unknown_sequence_ids().begin(),
                                       response.unknown_sequence_ids().end());
    for (SequenceId sequence : request.sequence_ids()) {
      if (!unknown.contains(sequence)) NoteRenewed(sequence, sent);
    }
  }
  if (status.ok()) {
    MutexLock lock(&mutex_);
    answered_number_ = response.number();
    pressure_ = {response.host_shortage_bytes(), response.host_restable_bytes(), sent};
  }
  MutexLock lock(&listener_mutex_);
  for (SequenceId sequence : response.unknown_sequence_ids()) {
    if (on_unknown_) on_unknown_(sequence);
  }
  for (SequenceId sequence : response.suspended_sequence_ids()) {
    if (on_suspended_ && WasListed(sequence, sent)) on_suspended_(sequence);
  }
  return status;
}

void CacheLink::Leave() {
  StopHeartbeats();
  if (!up()) return;
  v1::LeaveRequest request;
  request.set_group(options_.group);
  request.set_rank(options_.rank);
  request.set_epoch(epoch());
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Seconds(1)));
  v1::LeaveResponse response;
  const grpc::Status status = service()->group->Leave(&context, request, &response);
  if (!status.ok()) LogDebug("leaving the group failed", {{"error", status.error_message()}});
}

Epoch CacheLink::epoch() const {
  MutexLock lock(&mutex_);
  return epoch_;
}

std::vector<std::string> CacheLink::addresses() const {
  MutexLock lock(&mutex_);
  return addresses_;
}

bool CacheLink::up() const {
  MutexLock lock(&mutex_);
  return up_;
}

void CacheLink::Note(const absl::Status& status) {
  MutexLock lock(&mutex_);
  up_ = !ServiceIsAway(status);
  choice_.NoteHome(up_, absl::Now());
}

bool CacheLink::lost() const {
  MutexLock lock(&mutex_);
  return another_answers_ && choice_.HomeIsLost(absl::Now());
}

void CacheLink::LookForAnother() {
  std::vector<int> others;
  {
    MutexLock lock(&mutex_);
    another_answers_ = false;
    const absl::Time now = absl::Now();
    if (choice_.HomeIsLost(now)) others = choice_.Others(now);
  }
  for (const int other : others) {
    if (stop_->stopped()) return;
    grpc::Channel& channel = *services_[static_cast<size_t>(other)]->channel;
    if (!channel.WaitForConnected(absl::ToChronoTime(absl::Now() + kConnectTimeout))) continue;
    MutexLock lock(&mutex_);
    another_answers_ = true;
    return;
  }
}

void CacheLink::AddSequence(SequenceId sequence, absl::Time renewed) {
  MutexLock lock(&mutex_);
  Listed& listed = sequences_[sequence];
  ++listed.count;
  listed.renewed = std::max(listed.renewed, renewed);
  listed.since = clock().Now();
}

// Since before `sent`: one that has been opened again meanwhile is suspended no more.
bool CacheLink::WasListed(SequenceId sequence, absl::Time sent) const {
  MutexLock lock(&mutex_);
  const auto found = sequences_.find(sequence);
  return found != sequences_.end() && found->second.since <= sent;
}

void CacheLink::RemoveSequence(SequenceId sequence) {
  MutexLock lock(&mutex_);
  const auto found = sequences_.find(sequence);
  if (found != sequences_.end() && --found->second.count == 0) sequences_.erase(found);
}

void CacheLink::ForgetSequence(SequenceId sequence) {
  MutexLock lock(&mutex_);
  sequences_.erase(sequence);
}

absl::Time CacheLink::RenewedAt(SequenceId sequence) const {
  MutexLock lock(&mutex_);
  const auto found = sequences_.find(sequence);
  return found == sequences_.end() ? absl::InfinitePast() : found->second.renewed;
}

void CacheLink::NoteRenewed(SequenceId sequence, absl::Time sent) {
  MutexLock lock(&mutex_);
  const auto found = sequences_.find(sequence);
  if (found != sequences_.end()) found->second.renewed = std::max(found->second.renewed, sent);
}

void CacheLink::SetListener(std::function<void(SequenceId)> on_unknown) {
  MutexLock lock(&listener_mutex_);
  on_unknown_ = std::move(on_unknown);
}

void CacheLink::SetSuspendListener(std::function<void(SequenceId)> on_suspended) {
  MutexLock lock(&listener_mutex_);
  on_suspended_ = std::move(on_suspended);
}

}  // namespace heavywater
