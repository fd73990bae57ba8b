#include "cache_service/cluster/directory.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

template <typename Record>
absl::StatusOr<Record> ParseRecord(const EtcdEntry& entry) {
  Record record;
  if (record.ParseFromString(entry.value)) return record;
  return absl::DataLossError(absl::StrCat("etcd's value of ", entry.key, " is no record of ours"));
}

}  // namespace

Directory::Directory(EtcdClient& etcd, std::string prefix, std::string service)
    : etcd_(etcd),
      prefix_(std::move(prefix)),
      service_(std::move(service)),
      services_(prefix_ + "/services/"),
      sequences_(prefix_ + "/sequences/") {}

std::string Directory::SequenceKey(SequenceId id) const {
  return absl::StrCat(sequences_, absl::StrFormat("%016x", id));
}

std::optional<SequenceId> Directory::IdOf(const std::string& key) const {
  SequenceId id = 0;
  if (!absl::StartsWith(key, sequences_)) return std::nullopt;
  if (!absl::SimpleHexAtoi(key.substr(sequences_.size()), &id)) return std::nullopt;
  return id;
}

absl::Status Directory::Register(const v1::ServiceRecord& record, int64_t lease) {
  return etcd_.Commit({}, {{ServiceKey(service_), record.SerializeAsString(), lease}}).status();
}

absl::StatusOr<int> Directory::ClaimSlot(int num_slots, int64_t lease) {
  for (int slot = 0; slot < num_slots; ++slot) {
    const std::string key = absl::StrCat(prefix_, "/slots/", slot);
    HW_ASSIGN_OR_RETURN(const auto claimed, etcd_.Commit({{key, 0}}, {{key, service_, lease}}));
    if (claimed.has_value()) return slot;
    HW_ASSIGN_OR_RETURN(const auto holder, etcd_.Get(key));
    if (!holder.has_value() || holder->value != service_) continue;
    HW_ASSIGN_OR_RETURN(const auto mine,
                        etcd_.Commit({{key, holder->revision}}, {{key, service_, lease}}));
    if (mine.has_value()) return slot;
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("all ", num_slots, " places of cache services under ", prefix_, " are taken"));
}

absl::StatusOr<bool> Directory::Lead(int64_t lease) {
  const std::string key = prefix_ + "/leader";
  HW_ASSIGN_OR_RETURN(const auto won, etcd_.Commit({{key, 0}}, {{key, service_, lease}}));
  if (won.has_value()) return true;
  HW_ASSIGN_OR_RETURN(const auto leader, etcd_.Get(key));
  return leader.has_value() && leader->value == service_;
}

absl::StatusOr<std::optional<HeldRecord>> Directory::Find(SequenceId id) {
  HW_ASSIGN_OR_RETURN(const auto entry, etcd_.Get(SequenceKey(id)));
  if (!entry.has_value()) return std::nullopt;
  HW_ASSIGN_OR_RETURN(v1::SequenceRecord record, ParseRecord<v1::SequenceRecord>(*entry));
  return HeldRecord{std::move(record), entry->revision};
}

absl::StatusOr<std::optional<int64_t>> Directory::Put(SequenceId id,
                                                      const v1::SequenceRecord& record,
                                                      int64_t revision) {
  const std::string key = SequenceKey(id);
  return etcd_.Commit({{key, revision}}, {{key, record.SerializeAsString()}});
}

absl::StatusOr<std::optional<int64_t>> Directory::TakeOver(SequenceId id, const HeldRecord& held,
                                                           const v1::SequenceRecord& record) {
  const std::string key = SequenceKey(id);
  return etcd_.Commit({{key, held.revision}, {ServiceKey(held.record.owner()), 0}},
                      {{key, record.SerializeAsString()}});
}

absl::StatusOr<bool> Directory::Remove(SequenceId id, int64_t revision) {
  const std::string key = SequenceKey(id);
  HW_ASSIGN_OR_RETURN(const auto removed, etcd_.Commit({{key, revision}}, {{key, std::nullopt}}));
  return removed.has_value();
}

absl::StatusOr<std::vector<std::pair<SequenceId, HeldRecord>>> Directory::ListSequences() {
  HW_ASSIGN_OR_RETURN(const EtcdClient::Listing listing, etcd_.List(sequences_));
  std::vector<std::pair<SequenceId, HeldRecord>> sequences;
  for (const EtcdEntry& entry : listing.entries) {
    const auto id = IdOf(entry.key);
    auto record = ParseRecord<v1::SequenceRecord>(entry);
    // Somebody else's keys are left alone.
    if (id.has_value() && record.ok()) {
      sequences.emplace_back(*id, HeldRecord{*std::move(record), entry.revision});
    }
  }
  return sequences;
}

absl::StatusOr<Directory::Snapshot> Directory::List() {
  Snapshot snapshot;
  HW_ASSIGN_OR_RETURN(const EtcdClient::Listing services, etcd_.List(services_));
  snapshot.revision = services.revision;
  for (const EtcdEntry& entry : services.entries) {
    auto record = ParseRecord<v1::ServiceRecord>(entry);
    if (record.ok()) snapshot.services.push_back(*std::move(record));
  }
  HW_ASSIGN_OR_RETURN(const auto sequences, ListSequences());
  for (const auto& [id, held] : sequences) {
    if (held.record.owner() == service_) snapshot.own_sequences.push_back(id);
  }
  return snapshot;
}

absl::StatusOr<std::unique_ptr<EtcdWatch>> Directory::Watch(int64_t revision) {
  return etcd_.Watch(prefix_ + "/", revision);
}

Directory::Change Directory::Parse(const EtcdEvent& event) const {
  Change change;
  if (absl::StartsWith(event.entry.key, services_)) {
    auto record = ParseRecord<v1::ServiceRecord>(event.entry);
    if (record.ok()) change.service_record = *std::move(record);
    change.service = event.entry.key.substr(services_.size());
  }
  change.sequence = IdOf(event.entry.key);
  if (change.sequence.has_value()) {
    auto record = ParseRecord<v1::SequenceRecord>(event.entry);
    if (record.ok()) change.sequence_record = *std::move(record);
  }
  return change;
}

}  // namespace heavywater
