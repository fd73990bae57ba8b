// Positions::kCacheRelative: keys lie unrotated in their slots, and attention turns
// keys and queries to their places in the cache, 0, 1, ... by order of position.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/cache/device_memory.h"
#include "worker/cache/layer_storage.h"
#include "worker/policy/policy.h"
#include "worker/rank/rank_cache.h"
#include "worker/rank/sequence_options.h"

namespace heavywater {

// Places that a sequence's attention can need: those of its prompt, and of its largest
// set with a step's tokens, as far as the model knows places.
int64_t NumPlaces(const RankCacheOptions& options, const SequenceOptions& sequence,
                  std::span<const int64_t> capacities);

// Device bytes of a sequence, 0 at absolute positions: its angles; turned keys and
// queries of a step; turned keys of a prompt's layer.
struct PlaceBytes {
  int64_t angles = 0;
  int64_t step = 0;
  int64_t prompt = 0;
};
PlaceBytes PlaceBytesOf(const RankCacheOptions& options, const SequenceOptions& sequence,
                        std::span<const int64_t> capacities);

// INVALID_ARGUMENT naming the field: this rank knows no RoPE, or prompt or budget are
// beyond the places that the model was trained for.
absl::Status CheckPlaces(const RankCacheOptions& options, const SequenceOptions& sequence,
                         const Budget& budget);
// Only the latter, of a sequence at cache-relative positions.
absl::Status CheckTrainedPlaces(int64_t trained_tokens, int num_layers,
                                const SequenceOptions& sequence, const Budget& budget);

// The place of each slot, [num_sets][used]; 0 of free ones.
std::vector<int32_t> PlacesOfSlots(const LayerStorage& layer);

// Of one sequence.
class CachePlaces {
 public:
  // Within the sequence's reservation.
  static absl::StatusOr<std::unique_ptr<CachePlaces>> Create(const RankCacheOptions& options,
                                                             int64_t num_places,
                                                             DeviceMemory& memory, Stream& stream);

  int64_t device_bytes() const { return angles_.bytes(); }
  int64_t num_places() const { return num_places_; }
  // [num_places][head_dim], as RotateKeysParams has them. Equal in all sequences of a
  // rank, as far as both go.
  DeviceSpan<const float> angles() const { return angles_.As<float>(); }

 private:
  CachePlaces() = default;

  int64_t num_places_ = 0;
  DeviceBuffer angles_;
};

}  // namespace heavywater
