#include "worker/rank/cache_places.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"

namespace heavywater {
namespace {

bool IsRelative(const SequenceOptions& sequence) {
  return sequence.policy.positions == Positions::kCacheRelative;
}

// Of one layer's keys in `slots` slots a head.
int64_t KeyBytes(const KvShape& shape, int64_t slots) {
  return shape.num_kv_heads * slots * shape.head_dim * ElementBytes(shape.dtype);
}

// Half cosines, then half sines, of each place. In double, as the model's own.
std::vector<float> AnglesOf(std::span<const double> frequencies, int64_t num_places) {
  std::vector<float> angles;
  angles.reserve(num_places * 2 * frequencies.size());
  for (int64_t place = 0; place < num_places; ++place) {
    for (const double frequency : frequencies) {
      angles.push_back(static_cast<float>(std::cos(static_cast<double>(place) * frequency)));
    }
    for (const double frequency : frequencies) {
      angles.push_back(static_cast<float>(std::sin(static_cast<double>(place) * frequency)));
    }
  }
  return angles;
}

absl::Status CheckTrained(const char* what, int64_t got, int64_t trained) {
  if (got <= trained) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, " is ", got, ", want at most the ", trained,
                   " places that the model was trained for, with positions cache_relative"));
}

}  // namespace

int64_t NumPlaces(const RankCacheOptions& options, const SequenceOptions& sequence,
                  std::span<const int64_t> capacities) {
  const int64_t most = *std::max_element(capacities.begin(), capacities.end());
  const int64_t wanted = std::max(sequence.prompt_tokens, most + options.max_step_tokens);
  return options.trained_tokens == 0 ? wanted : std::min(wanted, options.trained_tokens);
}

PlaceBytes PlaceBytesOf(const RankCacheOptions& options, const SequenceOptions& sequence,
                        std::span<const int64_t> capacities) {
  if (!IsRelative(sequence)) return {};
  const KvShape& shape = options.shape;
  const int64_t row = int64_t{shape.head_dim} * int64_t{sizeof(float)};
  const int64_t most = *std::max_element(capacities.begin(), capacities.end());
  return {.angles = NumPlaces(options, sequence, capacities) * row,
          .step = KeyBytes(shape, most) + options.max_step_tokens * shape.num_query_heads * row,
          .prompt = KeyBytes(shape, sequence.prompt_tokens)};
}

absl::Status CheckPlaces(const RankCacheOptions& options, const SequenceOptions& sequence,
                         const Budget& budget) {
  if (!IsRelative(sequence)) return absl::OkStatus();
  if (options.rope_frequencies.empty()) {
    return absl::InvalidArgumentError(
        "positions is cache_relative, want absolute: this worker has no model whose rotary "
        "embedding it knows");
  }
  if (options.trained_tokens == 0) return absl::OkStatus();
  return CheckTrainedPlaces(options.trained_tokens, options.shape.num_layers, sequence, budget);
}

absl::Status CheckTrainedPlaces(int64_t trained_tokens, int num_layers,
                                const SequenceOptions& sequence, const Budget& budget) {
  HW_RETURN_IF_ERROR(CheckTrained("prompt_tokens", sequence.prompt_tokens, trained_tokens));
  if (!budget.bounded_decode) {
    return CheckTrained("max_tokens of a policy that is unbounded in decode", sequence.max_tokens,
                        trained_tokens);
  }
  for (int layer = 0; layer < num_layers; ++layer) {
    const int64_t slots = budget.OfLayer(layer).budget_tokens + sequence.policy.plan_interval_steps;
    HW_RETURN_IF_ERROR(CheckTrained("heavy + recent + plan_interval_steps", slots, trained_tokens));
  }
  return absl::OkStatus();
}

std::vector<int32_t> PlacesOfSlots(const LayerStorage& layer) {
  std::vector<int32_t> places(layer.num_sets() * layer.used(), 0);
  for (int set = 0; set < layer.num_sets(); ++set) {
    int32_t place = 0;
    for (const int32_t slot : layer.table(set).SlotsByPosition()) {
      places[set * layer.used() + slot] = place++;
    }
  }
  return places;
}

absl::StatusOr<std::unique_ptr<CachePlaces>> CachePlaces::Create(const RankCacheOptions& options,
                                                                 int64_t num_places,
                                                                 DeviceMemory& memory,
                                                                 Stream& stream) {
  const std::vector<float> angles = AnglesOf(options.rope_frequencies, num_places);
  std::unique_ptr<CachePlaces> places(new CachePlaces);
  places->num_places_ = num_places;
  HW_ASSIGN_OR_RETURN(
      places->angles_,
      memory.Allocate(MemoryKind::kTables, static_cast<int64_t>(std::span(angles).size_bytes())));
  HW_RETURN_IF_ERROR(memory.backend().CopyToDevice(DeviceBytes(places->angles_.As<float>()),
                                                   std::as_bytes(std::span(angles)), stream));
  return places;
}

}  // namespace heavywater
