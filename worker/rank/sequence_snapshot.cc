// How a sequence's state is taken, and how a sequence begins in one: the slots are
// filled from the host pages.
#include "worker/rank/sequence_snapshot.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/policy/head_budgets.h"
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
  for (int block = 0; block < blocks_.num_blocks() && with_slots; ++block) {
    HW_ASSIGN_OR_RETURN(const std::vector<int64_t> scores, ReadScores(block));
    for (int set = 0; set < blocks_.sets.own_sets; ++set) {
      SlotSnapshot& slots = snapshot.slots.emplace_back();
      const std::span<const Position> positions = table(block, set).positions();
      slots.positions.assign(positions.begin(), positions.end());
      const auto first = scores.begin() + set * storage_[block].capacity();
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

std::span<const SlotSnapshot> SequenceCache::SetsOf(const SequenceSnapshot& snapshot,
                                                    int block) const {
  const auto sets = static_cast<size_t>(blocks_.sets.own_sets);
  return std::span(snapshot.slots).subspan(static_cast<size_t>(block) * sets, sets);
}

std::vector<const std::byte*> SequenceCache::PagesOf(int block) const {
  const std::vector<const std::byte*> pages = host_pages_.AllPages(blocks_.LayerOf(block));
  if (!blocks_.divided) return pages;
  const auto of_head = static_cast<std::ptrdiff_t>(pages.size()) / blocks_.per_layer;
  const auto first = pages.begin() + block % blocks_.per_layer * of_head;
  return {first, first + of_head};
}

// How a layer's slots were divided shows in what its heads hold: a snapshot of such a
// sequence is taken at a plan, or where nothing goes.
absl::Status SequenceCache::TakeBudgets(const SequenceSnapshot& snapshot) {
  const BlockSizes largest = sizes_;
  const int64_t later = budget_.bounded_decode ? 0 : snapshot.tokens_seen - options_.prompt_tokens;
  for (int layer = 0; layer < rank_.shape.num_layers && blocks_.divided; ++layer) {
    const LayerBudget even = budget_.OfLayer(layer);
    if (PromptKept(even, options_.prompt_tokens) == options_.prompt_tokens) continue;
    const int first = layer * blocks_.per_layer;
    int64_t left = 0;
    for (int i = 0; i < blocks_.per_layer; ++i) {
      left += largest.budgets[first + i].prompt_budget_tokens;
    }
    for (int block = first; block < first + blocks_.per_layer; ++block) {
      const std::vector<Position>& positions = SetsOf(snapshot, block).front().positions;
      const int64_t kept = static_cast<int64_t>(positions.size()) -
                           std::count(positions.begin(), positions.end(), kNoPosition) - later;
      const int64_t most =
          std::min(left, largest.budgets[first].prompt_budget_tokens);  // the first may get most
      left -= kept;
      if (kept < ProtectedAtPrompt(budget_) || kept > most) {
        return BadSnapshot("positions of a KV head", kept, most);
      }
      SetBudget(block, BudgetOfHead(even, budget_.sink_tokens, kept));
    }
  }
  return absl::OkStatus();
}

absl::Status SequenceCache::CheckSnapshot(const SequenceSnapshot& snapshot) {
  const int64_t sets = int64_t{blocks_.num_blocks()} * blocks_.sets.own_sets;
  if (static_cast<int64_t>(snapshot.slots.size()) != sets) {
    return BadSnapshot("sets", static_cast<int64_t>(snapshot.slots.size()), sets);
  }
  if (snapshot.tokens_seen < options_.prompt_tokens || snapshot.tokens_seen > options_.max_tokens) {
    return BadSnapshot("tokens_seen", snapshot.tokens_seen, options_.prompt_tokens);
  }
  if (snapshot.recall.has_value() != (recall_ != nullptr)) {
    return BadSnapshot("recall", snapshot.recall.has_value() ? 1 : 0, recall_ != nullptr ? 1 : 0);
  }
  HW_RETURN_IF_ERROR(TakeBudgets(snapshot));
  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    HW_RETURN_IF_ERROR(CheckBlock(block, SetsOf(snapshot, block), snapshot.tokens_seen));
  }
  return absl::OkStatus();
}

// Sets of a block have the same counts.
absl::Status SequenceCache::CheckBlock(int block, std::span<const SlotSnapshot> sets,
                                       int64_t tokens_seen) const {
  const std::vector<Position>& first = sets.front().positions;
  const auto used = static_cast<int64_t>(first.size());
  if (budget_.bounded_decode && used > sizes_.capacities[block]) {
    return BadSnapshot("slots of a set", used, sizes_.capacities[block]);
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
  for (int block = 0; block < blocks_.num_blocks(); ++block) {
    HW_RETURN_IF_ERROR(RestoreBlock(block, SetsOf(snapshot, block)));
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

absl::Status SequenceCache::RestoreBlock(int block, std::span<const SlotSnapshot> sets) {
  const auto used = static_cast<int64_t>(sets.front().positions.size());
  const int64_t page = rank_.shape.page_tokens;
  const int64_t capacity =
      budget_.bounded_decode ? sizes_.capacities[block] : (used + page - 1) / page * page;
  HW_ASSIGN_OR_RETURN(
      LayerStorage storage,
      LayerStorage::Create(blocks_.shape, blocks_.sets.own_sets, capacity, memory_, stream_));
  const std::vector<const std::byte*> pages = PagesOf(block);
  storage_.push_back(std::move(storage));
  for (int set = 0; set < blocks_.sets.own_sets; ++set) {
    const SlotSnapshot& from = sets[static_cast<size_t>(set)];
    storage_[block].table(set).Restore(from.positions);
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
                 .num_pages = static_cast<int64_t>(pages.size()) / blocks_.shape.num_kv_heads}};
    HW_RETURN_IF_ERROR(memory_.backend().PromoteSlots(blocks_.shape, View(block), params, stream_));
  }
  // The lists above are read as the stream runs.
  HW_RETURN_IF_ERROR(memory_.backend().Synchronize(stream_));
  AddBlockHash(block);
  return absl::OkStatus();
}

}  // namespace heavywater
