// Committed states of sequences, from the cache service.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "cache_service/base/ids.h"
#include "heavywater/v1/sequence.grpc.pb.h"
#include "worker/rank/sequence_snapshot.h"
#include "worker/server/cache_link.h"

namespace heavywater {

class SnapshotSource {
 public:
  // The link outlives this.
  explicit SnapshotSource(CacheLink& link);

  // This rank's state at `plan`: its own part, and rank 0's where all ranks hold the
  // same. Waits for the service, for seconds at most. NOT_FOUND, DATA_LOSS.
  absl::StatusOr<SequenceSnapshot> Read(SequenceId sequence, int64_t plan) const;

 private:
  absl::StatusOr<SequenceSnapshot> ReadPart(SequenceId sequence, int64_t plan, int rank) const;

  CacheLink& link_;
};

}  // namespace heavywater
