// How a sequence's state is taken, and how a sequence begins in one: the slots are
// filled from the host pages.
#include "worker/rank/sequence_snapshot.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

absl::Status BadSnapshot(const char* what, int64_t got, int64_t want) {
  return absl::DataLossError(absl::StrCat("snapshot: ", what, " is ", got, ", want ", want));
}

// Each position below `end` at most once, as many as `resident`.
absl::Status CheckSlots(const SlotSnapshot& slots, int64_t used, int64_t resident, int64_t end) {
  const auto num_slots = static_cast<int64_t>(slots.positions.size());
  if (num_slots != used) return BadSnapshot("slots of a set", num_slots, used);
  if (!slots.scores.empty() && slots.scores.size() != slots.positions.size()) {
    return BadSnapshot("scores of a set", static_cast<int64_t>(slots.scores.size()), used);
  }
  std::vector<bool> seen(static_cast<size_t>(end), false);
  int64_t count = 0;
  for (const Position position : slots.positions) {
    if (position == kNoPosition) continue;
    if (position < 0 || position >= end || seen[static_cast<size_t>(position)]) {
      return absl::DataLossError(
          absl::StrCat("snapshot: position ", position, " is twice in a set, or not below ", end));
    }
    seen[static_cast<size_t>(position)] = true;
    ++count;
  }
  return count == resident ? absl::OkStatus() : BadSnapshot("residents of a set", count, resident);
}

}  // namespace

bool SequenceCache::CanSnapshot() const {
  const bool between_plans = queries_since_plan_ > 0 && (budget_.uses_scores || recall_ != nullptr);
  // What pivotal counts will lose again is not in a snapshot.
  return prompt_done_ && broken_.ok() && !between_plans && history_ == nullptr &&
         host_pages_.first_unbacked() == std::numeric_limits<int64_t>::max();
}

absl::StatusOr<SequenceSnapshot> SequenceCache::Snapshot(bool with_slots) const {
  if (!CanSnapshot()) {
    return absl::FailedPreconditionError(
        "the sequence is between two plans, or not all of it is in host memory");
  }
  SequenceSnapshot snapshot;
  snapshot.tokens_seen = tokens_seen_;
  snapshot.plans = plans_;
  snapshot.queries_since_plan = queries_since_plan_;
  for (int layer = 0; layer < rank_.shape.num_layers && with_slots; ++layer) {
    HW_ASSIGN_OR_RETURN(const std::vector<int64_t> scores, ReadScores(layer));
    for (int set = 0; set < sets_.own_sets; ++set) {
      SlotSnapshot& slots = snapshot.slots.emplace_back();
      const std::span<const Position> positions = table(layer, set).positions();
      slots.positions.assign(positions.begin(), positions.end());
      const auto first = scores.begin() + set * layers_[layer].capacity();
      const auto last = first + static_cast<int64_t>(positions.size());
      const bool any = std::any_of(first, last, [](int64_t score) { return score != 0; });
      if (any) slots.scores.assign(first, last);
    }
  }
  if (recall_ != nullptr) {
    HW_ASSIGN_OR_RETURN(snapshot.recall, recall_->Snapshot(with_slots));
  }
  return snapshot;
}

absl::Status SequenceCache::CheckSnapshot(const SequenceSnapshot& snapshot) const {
  const int64_t sets = int64_t{rank_.shape.num_layers} * sets_.own_sets;
  if (static_cast<int64_t>(snapshot.slots.size()) != sets) {
    return BadSnapshot("sets", static_cast<int64_t>(snapshot.slots.size()), sets);
  }
  if (snapshot.tokens_seen < options_.prompt_tokens || snapshot.tokens_seen > options_.max_tokens) {
    return BadSnapshot("tokens_seen", snapshot.tokens_seen, options_.prompt_tokens);
  }
  if (snapshot.recall.has_value() != (recall_ != nullptr)) {
    return BadSnapshot("recall", snapshot.recall.has_value() ? 1 : 0, recall_ != nullptr ? 1 : 0);
  }
  for (int layer = 0; layer < rank_.shape.num_layers; ++layer) {
    const size_t index = static_cast<size_t>(layer) * sets_.own_sets;
    HW_RETURN_IF_ERROR(CheckLayer(
        layer, std::span(snapshot.slots).subspan(index, static_cast<size_t>(sets_.own_sets)),
        snapshot.tokens_seen));
  }
  return absl::OkStatus();
}

// Sets of a layer have the same counts.
absl::Status SequenceCache::CheckLayer(int layer, std::span<const SlotSnapshot> sets,
                                       int64_t tokens_seen) const {
  const std::vector<Position>& first = sets.front().positions;
  const auto used = static_cast<int64_t>(first.size());
  if (budget_.bounded_decode && used > planned_capacities_[static_cast<size_t>(layer)]) {
    return BadSnapshot("slots of a set", used, planned_capacities_[static_cast<size_t>(layer)]);
  }
  // Where nothing else bounds what is allocated for them.
  if (!budget_.bounded_decode && used > tokens_seen) {
    return BadSnapshot("slots of a set", used, tokens_seen);
  }
  const int64_t resident = used - std::count(first.begin(), first.end(), kNoPosition);
  for (const SlotSnapshot& slots : sets) {
    HW_RETURN_IF_ERROR(CheckSlots(slots, used, resident, tokens_seen));
  }
  return absl::OkStatus();
}

absl::Status SequenceCache::Restore(const SequenceSnapshot& snapshot, int64_t known_tokens) {
  HW_RETURN_IF_ERROR(BeginPrompt());
  HW_RETURN_IF_ERROR(CheckSnapshot(snapshot));
  HW_RETURN_IF_ERROR(host_pages_.TakeOver(snapshot.tokens_seen, known_tokens));
  for (int layer = 0; layer < rank_.shape.num_layers; ++layer) {
    const size_t first = static_cast<size_t>(layer) * sets_.own_sets;
    HW_RETURN_IF_ERROR(RestoreLayer(
        layer, std::span(snapshot.slots).subspan(first, static_cast<size_t>(sets_.own_sets))));
  }
  prompt_done_ = true;
  tokens_seen_ = snapshot.tokens_seen;
  plans_ = snapshot.plans;
  queries_since_plan_ = snapshot.queries_since_plan;
  if (recall_ != nullptr) {
    HW_RETURN_IF_ERROR(recall_->Restore(*snapshot.recall, snapshot.slots, tokens_seen_));
  }
  HW_RETURN_IF_ERROR(memory_.backend().Synchronize(stream_));
  host_pages_.Publish(tokens_seen_);
  reservation_.Resize(planned_bytes());
  NoteBytes(0);
  return absl::OkStatus();
}

absl::Status SequenceCache::RestoreLayer(int layer, std::span<const SlotSnapshot> sets) {
  const auto used = static_cast<int64_t>(sets.front().positions.size());
  const int64_t page = rank_.shape.page_tokens;
  const int64_t capacity = budget_.bounded_decode ? planned_capacities_[static_cast<size_t>(layer)]
                                                  : (used + page - 1) / page * page;
  HW_ASSIGN_OR_RETURN(LayerStorage storage, LayerStorage::Create(rank_.shape, sets_.own_sets,
                                                                 capacity, memory_, stream_));
  const std::vector<const std::byte*> pages = host_pages_.AllPages(layer);
  layers_.push_back(std::move(storage));
  for (int set = 0; set < sets_.own_sets; ++set) {
    const SlotSnapshot& from = sets[static_cast<size_t>(set)];
    layers_[layer].table(set).Restore(from.positions);
    std::vector<int32_t> slots;
    std::vector<Position> positions;
    std::vector<int64_t> scores;
    for (size_t slot = 0; slot < from.positions.size(); ++slot) {
      if (from.positions[slot] == kNoPosition) continue;
      slots.push_back(static_cast<int32_t>(slot));
      positions.push_back(from.positions[slot]);
      scores.push_back(from.scores.empty() ? 0 : from.scores[slot]);
    }
    const PromoteParams params{
        .set = set,
        .slots = slots,
        .positions = positions,
        .scores = scores,
        .host = {.pages = pages,
                 .num_pages = static_cast<int64_t>(pages.size()) / rank_.shape.num_kv_heads}};
    HW_RETURN_IF_ERROR(memory_.backend().PromoteSlots(rank_.shape, View(layer), params, stream_));
  }
  // The lists above are read as the stream runs.
  HW_RETURN_IF_ERROR(memory_.backend().Synchronize(stream_));
  AddLayerHash(layer);
  return absl::OkStatus();
}

}  // namespace heavywater
