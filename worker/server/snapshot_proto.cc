#include "worker/server/snapshot_proto.h"

#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "heavywater/v1/snapshot.pb.h"

namespace heavywater {
namespace {

constexpr int kFormatVersion = 1;

std::string ToString(const std::vector<std::byte>& bytes) {
  return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
}

std::vector<std::byte> ToBytes(const std::string& text) {
  std::vector<std::byte> bytes(text.size());
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

void ToProto(const LedgerSnapshot& ledger, v1::LedgerSnapshot& proto) {
  proto.set_stride(ledger.stride);
  proto.mutable_scores()->Assign(ledger.scores.begin(), ledger.scores.end());
  proto.mutable_clocks()->Assign(ledger.clocks.begin(), ledger.clocks.end());
  for (const LedgerSnapshot::Gain& one : ledger.unreported) {
    proto.add_heads(one.head);
    proto.add_positions(one.gain.position);
    proto.add_gains(one.gain.gain);
  }
}

void ToProto(const RecallSnapshot& recall, v1::RecallSnapshot& proto) {
  proto.set_sketched_tokens(recall.sketched_tokens);
  proto.set_clock(recall.clock);
  proto.set_channels(ToString(recall.channels));
  proto.set_squares(ToString(recall.squares));
  for (const LedgerSnapshot& ledger : recall.ledgers) ToProto(ledger, *proto.add_ledgers());
  proto.set_steps(recall.steps);
  proto.set_queries(recall.queries);
  proto.set_reads(recall.reads);
  proto.set_reads_max(recall.reads_max);
  proto.set_promoted(recall.promoted);
}

absl::StatusOr<LedgerSnapshot> FromProto(const v1::LedgerSnapshot& proto) {
  if (proto.heads_size() != proto.gains_size() || proto.positions_size() != proto.gains_size()) {
    return absl::DataLossError(absl::StrCat("snapshot: a ledger has ", proto.heads_size(),
                                            " heads, ", proto.positions_size(), " positions and ",
                                            proto.gains_size(), " gains"));
  }
  LedgerSnapshot ledger;
  ledger.stride = proto.stride();
  ledger.scores.assign(proto.scores().begin(), proto.scores().end());
  ledger.clocks.assign(proto.clocks().begin(), proto.clocks().end());
  for (int i = 0; i < proto.gains_size(); ++i) {
    ledger.unreported.push_back({proto.heads(i), {proto.positions(i), proto.gains(i)}});
  }
  return ledger;
}

absl::StatusOr<RecallSnapshot> FromProto(const v1::RecallSnapshot& proto) {
  RecallSnapshot recall;
  recall.sketched_tokens = proto.sketched_tokens();
  recall.clock = proto.clock();
  recall.channels = ToBytes(proto.channels());
  recall.squares = ToBytes(proto.squares());
  for (const v1::LedgerSnapshot& ledger : proto.ledgers()) {
    absl::StatusOr<LedgerSnapshot> parsed = FromProto(ledger);
    if (!parsed.ok()) return parsed.status();
    recall.ledgers.push_back(*std::move(parsed));
  }
  recall.steps = proto.steps();
  recall.queries = proto.queries();
  recall.reads = proto.reads();
  recall.reads_max = proto.reads_max();
  recall.promoted = proto.promoted();
  return recall;
}

}  // namespace

std::string SerializeSnapshot(const SequenceSnapshot& snapshot) {
  v1::SequenceSnapshot proto;
  proto.set_format_version(kFormatVersion);
  proto.set_tokens_seen(snapshot.tokens_seen);
  proto.set_plans(snapshot.plans);
  proto.set_queries_since_plan(snapshot.queries_since_plan);
  for (const SlotSnapshot& slots : snapshot.slots) {
    v1::SlotSnapshot& to = *proto.add_slots();
    to.mutable_positions()->Assign(slots.positions.begin(), slots.positions.end());
    to.mutable_scores()->Assign(slots.scores.begin(), slots.scores.end());
  }
  if (snapshot.recall.has_value()) ToProto(*snapshot.recall, *proto.mutable_recall());
  return proto.SerializeAsString();
}

absl::StatusOr<SequenceSnapshot> ParseSnapshot(const std::string& bytes) {
  v1::SequenceSnapshot proto;
  if (!proto.ParseFromString(bytes)) {
    return absl::DataLossError(absl::StrCat("snapshot of ", bytes.size(), " bytes is none"));
  }
  if (proto.format_version() != kFormatVersion) {
    return absl::DataLossError(absl::StrCat("snapshot has format_version ", proto.format_version(),
                                            ", want ", kFormatVersion));
  }
  SequenceSnapshot snapshot;
  snapshot.tokens_seen = proto.tokens_seen();
  snapshot.plans = proto.plans();
  snapshot.queries_since_plan = proto.queries_since_plan();
  for (const v1::SlotSnapshot& from : proto.slots()) {
    SlotSnapshot& slots = snapshot.slots.emplace_back();
    slots.positions.assign(from.positions().begin(), from.positions().end());
    slots.scores.assign(from.scores().begin(), from.scores().end());
  }
  if (!proto.has_recall()) return snapshot;
  absl::StatusOr<RecallSnapshot> recall = FromProto(proto.recall());
  if (!recall.ok()) return recall.status();
  snapshot.recall = *std::move(recall);
  return snapshot;
}

absl::StatusOr<SequenceSnapshot> JoinSnapshots(SequenceSnapshot own,
                                               const SequenceSnapshot& shared) {
  const bool alike = own.tokens_seen == shared.tokens_seen && own.plans == shared.plans &&
                     own.recall.has_value() == shared.recall.has_value() &&
                     (!own.recall || own.recall->ledgers.size() == shared.recall->ledgers.size());
  if (!alike) {
    return absl::DataLossError(absl::StrCat("snapshots of two ranks differ: ", own.tokens_seen,
                                            " and ", shared.tokens_seen, " tokens, ", own.plans,
                                            " and ", shared.plans, " plans"));
  }
  own.slots = shared.slots;
  for (size_t i = 0; own.recall.has_value() && i < own.recall->ledgers.size(); ++i) {
    const LedgerSnapshot& from = shared.recall->ledgers[i];
    LedgerSnapshot& to = own.recall->ledgers[i];
    to.stride = from.stride;
    to.scores = from.scores;
    to.clocks = from.clocks;
  }
  return own;
}

}  // namespace heavywater
