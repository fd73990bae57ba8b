// Snapshots of sequences as bytes, and back.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "worker/rank/sequence_snapshot.h"

namespace heavywater {

std::string SerializeSnapshot(const SequenceSnapshot& snapshot);
// DATA_LOSS for what is none, or of another format.
absl::StatusOr<SequenceSnapshot> ParseSnapshot(const std::string& bytes);

// `own`, with what it lacks (slots, the ledgers' scores) from `shared`, another rank's
// that holds the same. DATA_LOSS when they are not of the same state.
absl::StatusOr<SequenceSnapshot> JoinSnapshots(SequenceSnapshot own,
                                               const SequenceSnapshot& shared);

}  // namespace heavywater
