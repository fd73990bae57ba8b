// What cache services know of each other: their records in etcd.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "cache_service/base/ids.h"
#include "cache_service/etcd/etcd_client.h"
#include "heavywater/v1/cache_cluster.pb.h"

namespace heavywater {

// A sequence's record, and the revision of its last change.
struct HeldRecord {
  v1::SequenceRecord record;
  int64_t revision = 0;
};

// Thread safe. Every call waits for etcd; UNAVAILABLE as EtcdClient says.
class Directory {
 public:
  // `service`: this one, by a name that no other has and that a restart with a state keeps.
  // The client must outlive it.
  Directory(EtcdClient& etcd, std::string prefix, std::string service);

  const std::string& service() const { return service_; }

  // --- Services ---
  // This service is heard of while the lease lives. NOT_FOUND: it has ended.
  absl::Status Register(const v1::ServiceRecord& record, int64_t lease);
  // The lowest of `num_slots` numbers that nobody holds, for as long as the lease lives; the one
  // that this service holds already. RESOURCE_EXHAUSTED.
  absl::StatusOr<int> ClaimSlot(int num_slots, int64_t lease);
  // Whether this service is the leader: it is when nobody else was, as long as its lease lives.
  absl::StatusOr<bool> Lead(int64_t lease);

  // --- Sequences ---
  absl::StatusOr<std::optional<HeldRecord>> Find(SequenceId id);
  // In the place of the one of that revision (0: there is none): the new revision. Null:
  // somebody else has changed it.
  absl::StatusOr<std::optional<int64_t>> Put(SequenceId id, const v1::SequenceRecord& record,
                                             int64_t revision);
  // Likewise, of a service that is not heard of: exactly one of several that try it wins.
  absl::StatusOr<std::optional<int64_t>> TakeOver(SequenceId id, const HeldRecord& held,
                                                  const v1::SequenceRecord& record);
  // False: somebody else has changed it.
  absl::StatusOr<bool> Remove(SequenceId id, int64_t revision);
  absl::StatusOr<std::vector<std::pair<SequenceId, HeldRecord>>> ListSequences();

  // --- What has changed ---
  struct Snapshot {
    std::vector<v1::ServiceRecord> services;
    std::vector<SequenceId> own_sequences;  // whose owner is this service
    int64_t revision = 0;
  };
  absl::StatusOr<Snapshot> List();
  absl::StatusOr<std::unique_ptr<EtcdWatch>> Watch(int64_t revision);
  // What an event of the watch is about; neither: something else.
  struct Change {
    std::optional<std::string> service = {};
    std::optional<SequenceId> sequence = {};
    v1::ServiceRecord service_record = {};  // unless it is gone
    v1::SequenceRecord sequence_record = {};
  };
  Change Parse(const EtcdEvent& event) const;

 private:
  std::string ServiceKey(const std::string& service) const { return services_ + service; }
  std::string SequenceKey(SequenceId id) const;
  std::optional<SequenceId> IdOf(const std::string& key) const;

  EtcdClient& etcd_;
  const std::string prefix_;
  const std::string service_;
  const std::string services_;   // what the keys of services begin with
  const std::string sequences_;  // likewise
};

}  // namespace heavywater
