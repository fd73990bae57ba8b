#include "worker/rank/sequence_cache.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/cache/read_device.h"
#include "worker/rank/recall_memory.h"
#include "worker/rank/stored_prefix.h"

namespace heavywater {
namespace {

absl::Status CheckStored(const RankCacheOptions& rank, const Budget& budget,
                         const SequenceOptions& sequence) {
  const int64_t stored = sequence.stored_tokens;
  const int64_t most = MostStoredTokens(budget, sequence);
  if (stored >= 0 && stored <= most && stored % rank.shape.page_tokens == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("stored_tokens is ", stored,
                                                 ", want a multiple of page_tokens, ",
                                                 rank.shape.page_tokens, ", of at most ", most));
}

}  // namespace

SequenceCache::SequenceCache(const RankCacheOptions& rank, SequenceId id,
                             const SequenceOptions& options, DeviceMemory& memory, Stream& stream)
    : rank_(rank),
      id_(id),
      options_(options),
      memory_(memory),
      stream_(stream),
      blocks_(BlocksOf(rank, options.policy)) {}

absl::StatusOr<std::unique_ptr<SequenceCache>> SequenceCache::Create(
    const RankCacheOptions& options, SequenceId id, const SequenceOptions& sequence,
    DeviceMemory& memory, Stream& stream, HostTier* tier) {
  std::unique_ptr<SequenceCache> cache(new SequenceCache(options, id, sequence, memory, stream));
  HW_ASSIGN_OR_RETURN(cache->budget_, ResolveSequenceBudget(options.shape, sequence));
  cache->sizes_ = LargestSizes(options, cache->budget_, sequence);
  const SequenceBytes bytes =
      BytesOf(options, memory.backend(), cache->budget_, sequence, cache->sizes_);
  HW_ASSIGN_OR_RETURN(cache->reservation_,
                      memory.Reserve(bytes.total(), absl::StrCat("sequence ", id)));
  HW_RETURN_IF_ERROR(CheckStored(options, cache->budget_, sequence));
  HW_ASSIGN_OR_RETURN(cache->host_pages_, HostPages::Open(options, tier, id, sequence));
  if (sequence.stored_tokens > 0) {
    HW_RETURN_IF_ERROR(cache->host_pages_.TakeOver(sequence.stored_tokens, sequence.stored_tokens));
  }
  if (sequence.policy.recall.enabled) {
    HW_ASSIGN_OR_RETURN(cache->recall_, SequenceRecall::Create(options, sequence, cache->budget_,
                                                               memory, stream, cache->host_pages_));
  }
  if (cache->budget_.gains == GainKind::kPivotal) {
    cache->history_ = std::make_unique<PivotalHistory>(
        cache->blocks_.num_blocks(), cache->blocks_.sets.own_sets, sequence.policy.history_window);
  }
  if (sequence.policy.positions == Positions::kCacheRelative) {
    const int64_t places = NumPlaces(options, sequence, cache->sizes_.capacities);
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

void SequenceCache::SetBudget(int block, const LayerBudget& budget) {
  HW_CHECK(block >= static_cast<int>(storage_.size()));
  sizes_.Set(block, budget, rank_, options_);
}

absl::Status SequenceCache::AddPromptBlock(const LayerView& whole, std::span<const Position> kept,
                                           DeviceSpan<const int64_t> seeds,
                                           std::span<const int64_t> demoted_scores) {
  const int sets = blocks_.sets.own_sets;
  const int64_t kept_per_set = static_cast<int64_t>(kept.size()) / sets;
  const int64_t page = rank_.shape.page_tokens;
  const int64_t capacity = budget_.bounded_decode ? sizes_.capacities[storage_.size()]
                                                  : (kept_per_set + page - 1) / page * page;
  HW_ASSIGN_OR_RETURN(LayerStorage block,
                      LayerStorage::Create(blocks_.shape, sets, capacity, memory_, stream_));
  HW_RETURN_IF_ERROR(memory_.backend().GatherSlots(blocks_.shape, whole, block.View(blocks_.shape),
                                                   kept, kept_per_set, seeds, whole.capacity,
                                                   stream_));
  for (int set = 0; set < sets; ++set) {
    block.table(set).Assign(kept.subspan(set * kept_per_set, kept_per_set));
  }
  storage_.push_back(std::move(block));
  const int index = static_cast<int>(storage_.size()) - 1;
  AddBlockHash(index);
  if (recall_ == nullptr) return absl::OkStatus();
  return recall_->AddPromptLayer(index, kept, demoted_scores);
}

void SequenceCache::FinishPrompt() {
  HW_CHECK(static_cast<int>(storage_.size()) == blocks_.num_blocks());
  prompt_done_ = true;
  tokens_seen_ = options_.prompt_tokens;
  host_pages_.Publish(tokens_seen_);
  reservation_.Resize(planned_bytes());
  NoteBytes(0);
}

absl::Status SequenceCache::PrepareAppend(Position first_position, int64_t num_tokens) {
  if (!prompt_done_) {
    HW_RETURN_IF_ERROR(broken_);
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
  HW_RETURN_IF_ERROR(broken_);
  return host_pages_.Prepare(tokens_seen_, tokens_seen_ + num_tokens);
}

// At places in the cache an append must end within those that there are.
absl::Status SequenceCache::CheckPlacesLeft(int64_t num_tokens) const {
  if (places_ == nullptr) return absl::OkStatus();
  for (const LayerStorage& layer : storage_) {
    if (layer.resident() + num_tokens <= places_->num_places()) continue;
    return absl::OutOfRangeError(absl::StrCat(
        num_tokens, " tokens after ", layer.resident(), " resident ones, want at most ",
        places_->num_places(), " together, the places of positions cache_relative"));
  }
  return absl::OkStatus();
}

void SequenceCache::TakeSlots(int layer, int64_t num_tokens, std::vector<int32_t>& slots) {
  for (int i = 0; i < blocks_.per_layer; ++i) {
    LayerStorage& block = storage_[layer * blocks_.per_layer + i];
    for (int set = 0; set < block.num_sets(); ++set) {
      block.table(set).Append(static_cast<Position>(tokens_seen_), num_tokens, slots);
    }
  }
}

void SequenceCache::CommitAppend(int64_t num_tokens, std::span<const int32_t> slots) {
  auto slot = slots.begin();
  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    for (int set = 0; set < blocks_.sets.own_sets; ++set) {
      for (int64_t i = 0; i < num_tokens; ++i, ++slot) {
        AddResident(blocks_.LayerOf(block), ModelHead(block, set) + 1, *slot,
                    static_cast<Position>(tokens_seen_ + i), hash_);
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
  const int64_t per_block = num_tokens * blocks_.sets.own_sets;
  for (int64_t i = 0; i * num_tokens < static_cast<int64_t>(slots.size()); ++i) {
    const int block = static_cast<int>(i * num_tokens / per_block);
    const int set = static_cast<int>(i % blocks_.sets.own_sets);
    const std::span<const int32_t> taken = slots.subspan(i * num_tokens, num_tokens);
    HW_RETURN_IF_ERROR(
        memory_.backend().ReleaseSlots(blocks_.shape, View(block), set, taken, stream_));
    storage_[block].table(set).Undo(taken, used_before[block]);
  }
  // The failed step's queries have added to the gains of slots that stay.
  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    HW_RETURN_IF_ERROR(memory_.backend().Zero(DeviceBytes(View(block).gains), stream_));
  }
  queries_since_plan_ = 0;
  if (recall_ != nullptr) recall_->UndoStep();
  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    if (storage_[block].used() > sizes_.capacities[block]) return absl::OkStatus();
  }
  return ShrinkToPlannedCapacity();
}

absl::Status SequenceCache::ReleaseVictims(int block, int set, std::span<const int32_t> victims) {
  if (victims.empty()) return absl::OkStatus();
  HW_RETURN_IF_ERROR(
      memory_.backend().ReleaseSlots(blocks_.shape, View(block), set, victims, stream_));
  const std::span<const Position> positions = storage_[block].table(set).positions();
  for (int32_t slot : victims) {
    RemoveResident(blocks_.LayerOf(block), ModelHead(block, set) + 1, slot, positions[slot], hash_);
  }
  storage_[block].table(set).Release(victims);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int64_t>> SequenceCache::ReadScores(int block) const {
  return ReadDevice(View(block).scores, memory_.backend(), stream_);
}

absl::Status SequenceCache::Promote(int layer, int set, std::span<const Position> positions,
                                    std::span<const int64_t> scores) {
  if (positions.empty()) return absl::OkStatus();
  std::vector<int32_t> slots;
  storage_[layer].table(set).Place(positions, slots);  // recall: blocks are layers
  for (size_t i = 0; i < slots.size(); ++i) {
    AddResident(layer, ModelHead(layer, set) + 1, slots[i], positions[i], hash_);
  }
  recall_->Promote(layer, set, positions);
  if (!broken_.ok()) return absl::OkStatus();
  const PromoteParams params{.set = set,
                             .slots = slots,
                             .positions = positions,
                             .scores = scores,
                             .host = recall_->HostTable(layer)};
  return memory_.backend().PromoteSlots(rank_.shape, View(layer), params, stream_);
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
  BlockSizes grown = sizes_;
  bool beyond_plan = false;
  int64_t largest_block_bytes = 0;
  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    const int64_t slots =
        budget_.bounded_decode ? needed[block] : (needed[block] + page - 1) / page * page;
    grown.capacities[block] = std::max(storage_[block].capacity(), slots);
    beyond_plan = beyond_plan || grown.capacities[block] > sizes_.capacities[block];
    largest_block_bytes = std::max(largest_block_bytes, BlockBytes(grown.capacities[block]));
  }
  if (beyond_plan) {
    const SequenceBytes bytes = BytesOf(rank_, memory_.backend(), budget_, options_, grown);
    HW_RETURN_IF_ERROR(reservation_.Extend(
        std::max(reservation_.bytes(), bytes.steady() + largest_block_bytes),
        absl::StrCat("an append that needs ", *std::max_element(needed.begin(), needed.end()),
                     " slots until the next plan")));
  }
  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    if (grown.capacities[block] == storage_[block].capacity()) continue;
    NoteBytes(BlockBytes(grown.capacities[block]));
    HW_RETURN_IF_ERROR(
        storage_[block].Grow(blocks_.shape, grown.capacities[block], memory_, stream_));
  }
  return absl::OkStatus();
}

int64_t SequenceCache::BlockBytes(int64_t capacity) const {
  return DeviceLayerBytes(blocks_.shape, blocks_.sets.own_sets, capacity).total();
}

bool SequenceCache::WithinPlannedCapacity() const {
  for (size_t block = 0; block < storage_.size(); ++block) {
    if (storage_[block].capacity() > sizes_.capacities[block]) return false;
  }
  return true;
}

absl::Status SequenceCache::ShrinkToPlannedCapacity() {
  if (!budget_.bounded_decode || WithinPlannedCapacity()) return absl::OkStatus();
  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    if (storage_[block].capacity() <= sizes_.capacities[block]) continue;
    HW_RETURN_IF_ERROR(
        storage_[block].Shrink(blocks_.shape, sizes_.capacities[block], memory_, stream_));
  }
  hash_ = PlanHash();  // some residents have moved
  for (int block = 0; block < blocks_.num_blocks(); ++block) AddBlockHash(block);
  return absl::OkStatus();
}

int64_t SequenceCache::planned_bytes() const {
  return BytesOf(rank_, memory_.backend(), budget_, options_, sizes_).steady();
}

bool SequenceCache::has_excess_reservation() const {
  return prompt_done_ && WithinPlannedCapacity() && reservation_.bytes() > planned_bytes();
}

void SequenceCache::GiveUpExcessReservation() { reservation_.Resize(planned_bytes()); }

int64_t SequenceCache::device_bytes() const {
  int64_t bytes = 0;
  for (const LayerStorage& block : storage_) bytes += block.bytes();
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
