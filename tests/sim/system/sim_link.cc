#include "tests/sim/system/sim_link.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace heavywater {
namespace {

constexpr absl::Duration kHeartbeatTimeout = absl::Seconds(2);
constexpr absl::Duration kJoinTimeout = absl::Seconds(1);

}  // namespace

SimLink::SimLink(SimWorld& world, SimService& service, SimCallerPtr caller, SimLinkOptions options)
    : world_(world), service_(service), caller_(std::move(caller)), options_(std::move(options)) {}

void SimLink::Join(Epoch failed) {
  ++loop_;
  joined_ = false;
  JoinOnce(kJoinTimeout, failed, /*again=*/true);
}

// `again`: until it works; else as part of the heartbeats.
void SimLink::JoinOnce(absl::Duration timeout, Epoch failed, bool again) {
  v1::JoinRequest request;
  request.set_group(kSimGroup);
  request.set_rank(options_.rank);
  request.set_size(options_.size);
  request.set_instance(options_.instance);
  *request.mutable_fingerprint() = options_.fingerprint;
  request.set_config_digest("simulated");
  request.set_advertised_address(options_.instance);
  request.set_timeout_ms(absl::ToInt64Milliseconds(timeout));
  request.set_failed_epoch(failed);
  const uint64_t loop = loop_;
  world_.network.CallLater<v1::JoinResponse>(
      caller_, timeout + absl::Seconds(2),
      [this, &service = service_,
       request](std::function<void(absl::StatusOr<v1::JoinResponse>)> answer) {
        service.registry().groups().Join(service.registry().groups().NewTicket(), request,
                                         std::move(answer));
      },
      [this, loop, failed, again](const absl::StatusOr<v1::JoinResponse>& result) {
        if (loop != loop_) return;
        if (result.ok()) {
          epoch_ = result->epoch();
          answered_number_ = 0;
          interval_ = absl::Milliseconds(result->heartbeat_interval_ms());
          joined_ = true;
          world_.trace.Note("join", static_cast<uint64_t>(options_.rank), epoch_);
          on_joined();
        } else {
          world_.trace.Note("join fails", static_cast<uint64_t>(options_.rank),
                            static_cast<uint64_t>(result.status().code()));
        }
        const auto next = [this, loop, failed, again, ok = result.ok()] {
          if (loop != loop_) return;
          if (ok || !again) {
            Beat();
          } else {
            JoinOnce(kJoinTimeout, failed, again);
          }
        };
        world_.network.AfterIfAlive(caller_, world_.Millis(1, 100), next);
      });
}

void SimLink::Beat() {
  v1::HeartbeatRequest request;
  request.set_group(kSimGroup);
  request.set_rank(options_.rank);
  request.set_epoch(epoch_);
  request.set_answered_number(answered_number_);
  for (const auto& [sequence, listed] : sequences_) request.add_sequence_ids(sequence);
  const absl::Time sent = world_.clock.Now();
  const uint64_t loop = loop_;
  world_.network.Call<v1::HeartbeatResponse>(
      caller_, kHeartbeatTimeout,
      [&service = service_, request] { return service.registry().Heartbeat(request); },
      [this, loop, request, sent](const absl::StatusOr<v1::HeartbeatResponse>& result) {
        if (loop != loop_) return;
        HandleBeat(request, sent, result);
      });
}

void SimLink::HandleBeat(const v1::HeartbeatRequest& request, absl::Time sent,
                         const absl::StatusOr<v1::HeartbeatResponse>& result) {
  const uint64_t loop = loop_;
  if (absl::IsAborted(result.status()) || absl::IsNotFound(result.status())) {
    JoinOnce(absl::Seconds(5), 0, /*again=*/false);
    return;
  }
  v1::HeartbeatResponse response;
  if (result.ok()) {
    response = *result;
    answered_number_ = response.number();
  }
  const std::set<SequenceId> unknown(response.unknown_sequence_ids().begin(),
                                     response.unknown_sequence_ids().end());
  if (result.ok() || absl::IsFailedPrecondition(result.status())) {
    for (const SequenceId sequence : request.sequence_ids()) {
      if (!unknown.contains(sequence)) NoteRenewed(sequence, sent);
    }
  }
  for (const SequenceId sequence : response.unknown_sequence_ids()) on_unknown(sequence);
  for (const SequenceId sequence : response.suspended_sequence_ids()) {
    const auto listed = sequences_.find(sequence);
    if (listed == sequences_.end() || listed->second.since > sent) continue;  // of before
    on_suspended(sequence, response);
  }
  if (loop != loop_) return;
  const absl::Duration delay = result.ok() ? interval_ : world_.Millis(100, 1000);
  world_.network.AfterIfAlive(caller_, delay, [this, loop] {
    if (loop == loop_) Beat();
  });
}

void SimLink::AddSequence(SequenceId sequence, absl::Time renewed) {
  Listed& listed = sequences_[sequence];
  ++listed.count;
  listed.renewed = std::max(listed.renewed, renewed);
  listed.since = world_.clock.Now();
}

void SimLink::RemoveSequence(SequenceId sequence) {
  const auto found = sequences_.find(sequence);
  if (found != sequences_.end() && --found->second.count == 0) sequences_.erase(found);
}

absl::Time SimLink::RenewedAt(SequenceId sequence) const {
  const auto found = sequences_.find(sequence);
  return found == sequences_.end() ? absl::InfinitePast() : found->second.renewed;
}

void SimLink::NoteRenewed(SequenceId sequence, absl::Time sent) {
  const auto found = sequences_.find(sequence);
  if (found != sequences_.end()) found->second.renewed = std::max(found->second.renewed, sent);
}

}  // namespace heavywater
