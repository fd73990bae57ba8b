#include "worker/rank/sequence_cache.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/cache/read_device.h"
#include "worker/rank/recall_memory.h"

namespace heavywater {

SequenceCache::SequenceCache(const RankCacheOptions& rank, SequenceId id,
                             const SequenceOptions& options, DeviceMemory& memory, Stream& stream)
    : rank_(rank),
      id_(id),
      options_(options),
      memory_(memory),
      stream_(stream),
      sets_(SetLayoutOf(rank, options.policy.scope)) {}

absl::StatusOr<std::unique_ptr<SequenceCache>> SequenceCache::Create(
    const RankCacheOptions& options, SequenceId id, const SequenceOptions& sequence,
    DeviceMemory& memory, Stream& stream, HostTier* tier) {
  std::unique_ptr<SequenceCache> cache(new SequenceCache(options, id, sequence, memory, stream));
  HW_ASSIGN_OR_RETURN(cache->budget_, ResolveSequenceBudget(options.shape, sequence));
  cache->planned_capacities_ = SlotCapacities(options, cache->budget_, sequence);
  const SequenceBytes bytes =
      BytesOf(options, memory.backend(), cache->budget_, sequence, cache->planned_capacities_);
  HW_ASSIGN_OR_RETURN(cache->reservation_,
                      memory.Reserve(bytes.total(), absl::StrCat("sequence ", id)));
  HW_ASSIGN_OR_RETURN(cache->host_pages_, HostPages::Open(options, tier, id, sequence));
  if (sequence.policy.recall.enabled) {
    HW_ASSIGN_OR_RETURN(cache->recall_, SequenceRecall::Create(options, sequence, cache->budget_,
                                                               memory, stream, cache->host_pages_));
  }
  if (cache->budget_.gains == GainKind::kPivotal) {
    cache->history_ = std::make_unique<PivotalHistory>(
        options.shape.num_layers, cache->sets_.own_sets, sequence.policy.history_window);
  }
  if (sequence.policy.positions == Positions::kCacheRelative) {
    const int64_t places = NumPlaces(options, sequence, cache->planned_capacities_);
    HW_ASSIGN_OR_RETURN(cache->places_, CachePlaces::Create(options, places, memory, stream));
  }
  return cache;
}

bool SequenceCache::PlanDue(int64_t num_tokens) const {
  if (!budget_.bounded_decode || !prompt_done_) return false;
  const int64_t interval = options_.policy.plan_interval_steps;
  const int64_t since_prompt = tokens_seen_ - options_.prompt_tokens;
  return (since_prompt + num_tokens) / interval > since_prompt / interval;
}

absl::Status SequenceCache::BeginPrompt() {
  if (prompt_begun_) {
    return absl::FailedPreconditionError(
        absl::StrCat("the prompt of sequence ", id_, " has begun already"));
  }
  prompt_begun_ = true;
  return absl::OkStatus();
}

absl::Status SequenceCache::AddPromptLayer(const LayerView& whole, std::span<const Position> kept,
                                           DeviceSpan<const int64_t> seeds,
                                           std::span<const int64_t> demoted_scores) {
  const int64_t kept_per_set = static_cast<int64_t>(kept.size()) / sets_.own_sets;
  const int64_t page = rank_.shape.page_tokens;
  const int64_t capacity = budget_.bounded_decode ? planned_capacities_[layers_.size()]
                                                  : (kept_per_set + page - 1) / page * page;
  HW_ASSIGN_OR_RETURN(LayerStorage layer, LayerStorage::Create(rank_.shape, sets_.own_sets,
                                                               capacity, memory_, stream_));
  HW_RETURN_IF_ERROR(memory_.backend().GatherSlots(rank_.shape, whole, layer.View(rank_.shape),
                                                   kept, kept_per_set, seeds, whole.capacity,
                                                   stream_));
  for (int set = 0; set < sets_.own_sets; ++set) {
    layer.table(set).Assign(kept.subspan(set * kept_per_set, kept_per_set));
  }
  layers_.push_back(std::move(layer));
  const int index = static_cast<int>(layers_.size()) - 1;
  AddLayerHash(index);
  if (recall_ == nullptr) return absl::OkStatus();
  return recall_->AddPromptLayer(index, kept, demoted_scores);
}

void SequenceCache::FinishPrompt() {
  HW_CHECK(static_cast<int>(layers_.size()) == rank_.shape.num_layers);
  prompt_done_ = true;
  tokens_seen_ = options_.prompt_tokens;
  host_pages_.Publish(tokens_seen_);
  reservation_.Resize(planned_bytes());
  NoteBytes(0);
}

absl::Status SequenceCache::PrepareAppend(Position first_position, int64_t num_tokens) {
  HW_RETURN_IF_ERROR(broken_);
  if (!prompt_done_) {
    return absl::FailedPreconditionError("the prompt has not run to its end");
  }
  if (first_position != tokens_seen_) {
    return absl::InvalidArgumentError(
        absl::StrCat("first_position is ", first_position, ", want tokens_seen, ", tokens_seen_));
  }
  if (tokens_seen_ + num_tokens > options_.max_tokens) {
    return absl::OutOfRangeError(absl::StrCat(num_tokens, " tokens after the ", tokens_seen_,
                                              " seen, want at most max_tokens, ",
                                              options_.max_tokens));
  }
  HW_RETURN_IF_ERROR(CheckPlacesLeft(num_tokens));
  HW_RETURN_IF_ERROR(EnsureCapacity(num_tokens));
  return host_pages_.Prepare(tokens_seen_, tokens_seen_ + num_tokens);
}

// At places in the cache an append must end within those that there are.
absl::Status SequenceCache::CheckPlacesLeft(int64_t num_tokens) const {
  if (places_ == nullptr) return absl::OkStatus();
  for (const LayerStorage& layer : layers_) {
    if (layer.resident() + num_tokens <= places_->num_places()) continue;
    return absl::OutOfRangeError(absl::StrCat(
        num_tokens, " tokens after ", layer.resident(), " resident ones, want at most ",
        places_->num_places(), " together, the places of positions cache_relative"));
  }
  return absl::OkStatus();
}

void SequenceCache::TakeSlots(int layer, int64_t num_tokens, std::vector<int32_t>& slots) {
  for (int set = 0; set < sets_.own_sets; ++set) {
    layers_[layer].table(set).Append(static_cast<Position>(tokens_seen_), num_tokens, slots);
  }
}

void SequenceCache::CommitAppend(int64_t num_tokens, std::span<const int32_t> slots) {
  auto slot = slots.begin();
  for (int layer = 0; layer < rank_.shape.num_layers; ++layer) {
    for (int set = 0; set < sets_.own_sets; ++set) {
      for (int64_t i = 0; i < num_tokens; ++i, ++slot) {
        AddResident(layer, ModelHead(set) + 1, *slot, static_cast<Position>(tokens_seen_ + i),
                    hash_);
      }
    }
  }
  tokens_seen_ += num_tokens;
  queries_since_plan_ += num_tokens;
  if (recall_ != nullptr) recall_->CommitStep();
  host_pages_.Publish(tokens_seen_);
}

absl::Status SequenceCache::UndoAppend(int64_t num_tokens, std::span<const int64_t> used_before,
                                       std::span<const int32_t> slots) {
  if (!prompt_done_) return absl::OkStatus();
  const int64_t per_layer = num_tokens * sets_.own_sets;
  for (int64_t i = 0; i * num_tokens < static_cast<int64_t>(slots.size()); ++i) {
    const int layer = static_cast<int>(i * num_tokens / per_layer);
    const int set = static_cast<int>(i % sets_.own_sets);
    const std::span<const int32_t> taken = slots.subspan(i * num_tokens, num_tokens);
    HW_RETURN_IF_ERROR(
        memory_.backend().ReleaseSlots(rank_.shape, View(layer), set, taken, stream_));
    layers_[layer].table(set).Undo(taken, used_before[layer]);
  }
  // The failed step's queries have added to the gains of slots that stay.
  for (int layer = 0; layer < rank_.shape.num_layers; ++layer) {
    HW_RETURN_IF_ERROR(memory_.backend().Zero(DeviceBytes(View(layer).gains), stream_));
  }
  queries_since_plan_ = 0;
  if (recall_ != nullptr) recall_->UndoStep();
  for (int layer = 0; layer < rank_.shape.num_layers; ++layer) {
    if (layers_[layer].used() > planned_capacities_[layer]) return absl::OkStatus();
  }
  return ShrinkToPlannedCapacity();
}

absl::Status SequenceCache::ReleaseVictims(int layer, int set, std::span<const int32_t> victims) {
  if (victims.empty()) return absl::OkStatus();
  HW_RETURN_IF_ERROR(
      memory_.backend().ReleaseSlots(rank_.shape, View(layer), set, victims, stream_));
  const std::span<const Position> positions = layers_[layer].table(set).positions();
  for (int32_t slot : victims) {
    RemoveResident(layer, ModelHead(set) + 1, slot, positions[slot], hash_);
  }
  layers_[layer].table(set).Release(victims);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> SequenceCache::ReadScores(int layer) const {
  return ReadDevice(View(layer).scores, memory_.backend(), stream_);
}

absl::Status SequenceCache::Promote(int layer, int set, std::span<const Position> positions,
                                    std::span<const int64_t> scores) {
  if (positions.empty()) return absl::OkStatus();
  std::vector<int32_t> slots;
  layers_[layer].table(set).Place(positions, slots);
  for (size_t i = 0; i < slots.size(); ++i) {
    AddResident(layer, ModelHead(set) + 1, slots[i], positions[i], hash_);
  }
  const PromoteParams params{.set = set,
                             .slots = slots,
                             .positions = positions,
                             .scores = scores,
                             .host = recall_->HostTable(layer)};
  HW_RETURN_IF_ERROR(memory_.backend().PromoteSlots(rank_.shape, View(layer), params, stream_));
  recall_->Promote(layer, set, positions);
  return absl::OkStatus();
}

absl::Status SequenceCache::FinishPlan() {
  if (recall_ != nullptr) {
    HW_RETURN_IF_ERROR(recall_->FinishPlan(tokens_seen_));
    host_pages_.Publish(tokens_seen_);  // the addresses it asked for are not written to
  }
  NoteBytes(0);
  ++plans_;
  queries_since_plan_ = 0;
  return ShrinkToPlannedCapacity();
}

absl::Status SequenceCache::EnsureCapacity(int64_t num_tokens) {
  if (Fits(num_tokens)) return absl::OkStatus();
  const int64_t page = rank_.shape.page_tokens;
  const std::vector<int64_t> needed = used_after(num_tokens);
  std::vector<int64_t> capacities;
  bool beyond_plan = false;
  int64_t largest_layer_bytes = 0;
  for (int layer = 0; layer < rank_.shape.num_layers; ++layer) {
    const int64_t slots =
        budget_.bounded_decode ? needed[layer] : (needed[layer] + page - 1) / page * page;
    capacities.push_back(std::max(layers_[layer].capacity(), slots));
    beyond_plan = beyond_plan || capacities[layer] > planned_capacities_[layer];
    largest_layer_bytes =
        std::max(largest_layer_bytes,
                 DeviceLayerBytes(rank_.shape, sets_.own_sets, capacities[layer]).total());
  }
  if (beyond_plan) {
    const SequenceBytes bytes = BytesOf(rank_, memory_.backend(), budget_, options_, capacities);
    HW_RETURN_IF_ERROR(reservation_.Extend(
        std::max(reservation_.bytes(), bytes.steady() + largest_layer_bytes),
        absl::StrCat("an append that needs ", *std::max_element(needed.begin(), needed.end()),
                     " slots until the next plan")));
  }
  for (int layer = 0; layer < rank_.shape.num_layers; ++layer) {
    if (capacities[layer] == layers_[layer].capacity()) continue;
    NoteBytes(DeviceLayerBytes(rank_.shape, sets_.own_sets, capacities[layer]).total());
    HW_RETURN_IF_ERROR(layers_[layer].Grow(rank_.shape, capacities[layer], memory_, stream_));
  }
  return absl::OkStatus();
}

bool SequenceCache::WithinPlannedCapacity() const {
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    if (layers_[layer].capacity() > planned_capacities_[layer]) return false;
  }
  return true;
}

absl::Status SequenceCache::ShrinkToPlannedCapacity() {
  if (!budget_.bounded_decode || WithinPlannedCapacity()) return absl::OkStatus();
  for (int layer = 0; layer < rank_.shape.num_layers; ++layer) {
    if (layers_[layer].capacity() <= planned_capacities_[layer]) continue;
    HW_RETURN_IF_ERROR(
        layers_[layer].Shrink(rank_.shape, planned_capacities_[layer], memory_, stream_));
  }
  hash_ = PlanHash();  // some residents have moved
  for (int layer = 0; layer < rank_.shape.num_layers; ++layer) AddLayerHash(layer);
  return absl::OkStatus();
}

int64_t SequenceCache::planned_bytes() const {
  return BytesOf(rank_, memory_.backend(), budget_, options_, planned_capacities_).steady();
}

bool SequenceCache::has_excess_reservation() const {
  return prompt_done_ && WithinPlannedCapacity() && reservation_.bytes() > planned_bytes();
}

void SequenceCache::GiveUpExcessReservation() { reservation_.Resize(planned_bytes()); }

int64_t SequenceCache::device_bytes() const {
  int64_t bytes = 0;
  for (const LayerStorage& layer : layers_) bytes += layer.bytes();
  if (recall_ != nullptr) bytes += recall_->device_bytes();
  if (places_ != nullptr) bytes += places_->device_bytes();
  return bytes;
}

void SequenceCache::NoteBytes(int64_t more_bytes) {
  const int64_t bytes = device_bytes() + more_bytes;
  peak_bytes_ = std::max(peak_bytes_, bytes);
  if (prompt_done_) peak_bytes_after_prompt_ = std::max(peak_bytes_after_prompt_, bytes);
}

}  // namespace heavywater
