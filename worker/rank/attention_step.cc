#include "worker/rank/attention_step.h"

#include <algorithm>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "cache_service/base/step_phases.h"
#include "worker/cache/device_bytes.h"
#include "worker/rank/head_attention.h"
#include "worker/rank/oracle_attention.h"
#include "worker/rank/placed_attention.h"
#include "worker/rank/plan.h"
#include "worker/rank/step_exchange.h"
#include "worker/rank/workspace.h"

namespace heavywater {

AttentionStep::AttentionStep(RankCache& cache)
    : cache_(cache), exchange_(std::make_unique<StepExchange>(cache)) {}

AttentionStep::~AttentionStep() = default;

void AttentionStep::Begin(uint64_t step, std::span<const StepItem> items,
                          std::span<const int64_t> first_rows, int64_t num_rows) {
  HW_CHECK(items.size() == first_rows.size());
  items_.clear();
  item_status_.assign(items.size(), absl::OkStatus());
  num_rows_ = num_rows;
  extra_logits_rows_ = 0;
  picks_wait_left_ = plans_wait_left_ = cache_.options().max_recall_wait;
  for (size_t i = 0; i < items.size(); ++i) {
    ActiveItem& item = items_.emplace_back();
    item.spec = items[i];
    item.first_row = first_rows[i];
    item.status = Admit(item);
    item_status_[i] = item.status;
  }
  exchange_->Layout(step, items_);
}

absl::Status AttentionStep::Admit(ActiveItem& item) {
  HW_ASSIGN_OR_RETURN(SequenceCache * sequence, cache_.Find(item.spec.sequence));
  if (!sequence->prompt_done()) {
    return absl::FailedPreconditionError("the prompt has not run to its end");
  }
  item.sequence = sequence;
  item.used_before = sequence->used();
  extra_logits_rows_ += item.logits_rows() - 1;
  HW_RETURN_IF_ERROR(sequence->PrepareAppend(item.spec.first_position, item.spec.num_tokens));
  if (sequence->recall() != nullptr) {
    sequence->recall()->BeginStep(item.spec.num_tokens, /*sample_missing=*/item.plans(),
                                  item.spec.note_reads);
  }
  return cache_.workspace().ReserveExtraLogits(extra_logits_rows_);
}

absl::Status AttentionStep::AppendAndAttend(int layer, const AttentionRows& rows) {
  const StepPhaseScope phase(StepPhase::kAttention);
  HW_RETURN_IF_ERROR(AppendKv(layer, rows));
  HW_RETURN_IF_ERROR(ObserveQueries(layer, rows));
  return Attend(layer, rows);
}

absl::Status AttentionStep::AppendKv(int layer, const AttentionRows& rows) {
  const KvShape& shape = cache_.options().shape;
  std::vector<AppendItem> appends;
  std::vector<HostRow> host_rows(num_rows_ * shape.num_kv_heads);
  for (ActiveItem& item : items_) {
    if (!item.status.ok()) continue;
    const size_t taken = item.slots.size();
    item.sequence->TakeSlots(layer, item.spec.num_tokens, item.slots);
    const int64_t first = item.spec.first_position;
    item.sequence->host_pages().FillRows(
        layer, first, first + item.spec.num_tokens,
        std::span(host_rows).subspan(item.first_row * shape.num_kv_heads));
    if (item.sequence->blocks().divided) continue;
    AppendItem append;
    append.layer = item.sequence->View(layer);
    append.first_token = item.first_row;
    append.num_tokens = item.spec.num_tokens;
    append.first_position = item.spec.first_position;
    append.slots = std::span(item.slots).subspan(taken);
    appends.push_back(append);
  }
  AppendParams params;
  params.items = appends;
  params.keys = rows.keys;
  params.values = rows.values;
  params.host_rows = host_rows;
  HW_RETURN_IF_ERROR(AppendHeads(cache_, items_, layer, params));
  return cache_.backend().Append(shape, params, cache_.stream());
}

// Until a sequence has a sketch, its queries tell which channels it should have.
absl::Status AttentionStep::ObserveQueries(int layer, const AttentionRows& rows) {
  const KvShape& shape = cache_.options().shape;
  const int64_t width = int64_t{shape.num_query_heads} * shape.head_dim;
  for (const ActiveItem& item : items_) {
    if (!item.status.ok()) continue;
    SequenceRecall* recall = item.sequence->recall();
    if (recall == nullptr || recall->sketched()) continue;
    HW_RETURN_IF_ERROR(recall->Observe(
        layer, rows.queries.Sub(item.first_row * width, item.spec.num_tokens * width),
        item.spec.num_tokens, item.spec.first_position));
  }
  return absl::OkStatus();
}

// Steps 2 and 3: one pass over the slots and what recall picks.
absl::Status AttentionStep::Attend(int layer, const AttentionRows& rows) {
  std::vector<AttendItem> attends;
  int64_t capacity = 0;
  RecallLimits limits;
  for (const ActiveItem& item : items_) {
    if (!item.status.ok()) continue;
    if (item.sequence->blocks().divided) {
      attends.emplace_back();  // attends by itself, below
      continue;
    }
    AttendItem attend;
    attend.layer = item.sequence->View(layer);
    attend.first_token = item.first_row;
    attend.num_tokens = item.spec.num_tokens;
    attend.first_position = item.spec.first_position;
    attend.accumulate_gains = item.sequence->budget().uses_scores;
    attend.gains = item.sequence->budget().gains;
    if (item.sequence->recall() != nullptr) attend.recall = item.sequence->recall()->View(layer);
    if (attend.recall != nullptr) limits.Raise(LimitsOf(*attend.recall));
    attends.push_back(attend);
    capacity = std::max(capacity, attend.layer.capacity);
  }
  AttendParams params;
  HW_ASSIGN_OR_RETURN(params.queries, TurnToPlaces(cache_, layer, items_, attends, rows));
  params.out = rows.out;
  params.scale = cache_.attention_scale();
  const int64_t of_heads = HeadScratchBytes(cache_, items_, layer);
  const bool only_heads = of_heads > 0 && capacity == 0;
  const int64_t of_layers =
      only_heads ? 0
                 : cache_.backend().AttendScratchBytes(cache_.options().shape, capacity, limits);
  HW_ASSIGN_OR_RETURN(params.scratch, cache_.workspace().Scratch(std::max(of_heads, of_layers)));
  if (attends.size() < items_.size()) HW_RETURN_IF_ERROR(ZeroRowsThatDoNotRun(rows));
  HW_ASSIGN_OR_RETURN(attends, AttendOracles(layer, attends, params));
  HW_RETURN_IF_ERROR(AttendHeads(cache_, items_, layer, params));
  if (only_heads) return absl::OkStatus();
  HW_RETURN_IF_ERROR(AwaitPicks(layer, attends, params));
  params.items = attends;
  return cache_.backend().Attend(cache_.options().shape, params, cache_.stream());
}

// Picks of sequences with RecallOptions::wait wait for the pages that rest: a pass that leaves
// nothing behind but `out`, which the real one writes again, tells which those are.
absl::Status AttentionStep::AwaitPicks(int layer, std::span<const AttendItem> attends,
                                       AttendParams params) {
  std::vector<SequenceRecall*> waiting;
  std::vector<AttendItem> ahead;
  for (const ActiveItem& item : items_) {
    SequenceRecall* const recall = item.status.ok() ? item.sequence->recall() : nullptr;
    if (recall == nullptr || !recall->MayWait(layer)) continue;
    const auto attend = std::find_if(attends.begin(), attends.end(), [&](const AttendItem& one) {
      return one.recall == recall->View(layer);
    });
    if (attend == attends.end()) continue;
    waiting.push_back(recall);
    ahead.push_back(*attend);
    ahead.back().accumulate_gains = false;
    ahead.back().recall = recall->LookAhead(layer);
  }
  if (waiting.empty()) return absl::OkStatus();
  params.items = ahead;
  HW_RETURN_IF_ERROR(cache_.backend().Attend(cache_.options().shape, params, cache_.stream()));
  HW_RETURN_IF_ERROR(cache_.backend().Synchronize(cache_.stream()));
  for (SequenceRecall* const recall : waiting) recall->AskForMissed(layer);
  // What does not come in time is missed, and counted.
  for (SequenceRecall* const recall : waiting) recall->AwaitAsked(layer, picks_wait_left_);
  return absl::OkStatus();
}

// Runs the items that choose within the step, and returns those that remain to be run
// together.
absl::StatusOr<std::vector<AttendItem>> AttentionStep::AttendOracles(
    int layer, std::span<const AttendItem> attends, const AttendParams& params) {
  std::vector<AttendItem> others;
  auto attend = attends.begin();
  for (const ActiveItem& item : items_) {
    if (!item.status.ok()) continue;
    if (item.sequence->budget().attended_tokens > 0) {
      HW_RETURN_IF_ERROR(AttendToTheTop(cache_, *item.sequence, layer, *attend, params));
    } else if (!item.sequence->blocks().divided) {
      others.push_back(*attend);
    }
    ++attend;
  }
  return others;
}

absl::Status AttentionStep::ZeroRowsThatDoNotRun(const AttentionRows& rows) {
  for (const ActiveItem& item : items_) {
    if (item.status.ok()) continue;
    const AttentionRows own =
        rows.Sub(cache_.options().shape, item.first_row, item.spec.num_tokens);
    HW_RETURN_IF_ERROR(cache_.backend().Zero(DeviceBytes(own.out), cache_.stream()));
  }
  return absl::OkStatus();
}

absl::Status AttentionStep::BeforeReduce() {
  const StepPhaseScope phase(StepPhase::kScores);
  return exchange_->Fill(items_);
}

DeviceSpan<int64_t> AttentionStep::reduce_buffer() { return exchange_->reduce_buffer(); }

absl::Status AttentionStep::AfterReduce() {
  const StepPhaseScope phase(StepPhase::kScores);
  if (absl::Status status = exchange_->Read(items_); !status.ok()) {
    UndoAll(status);
    return status;
  }
  for (size_t i = 0; i < items_.size(); ++i) {
    item_status_[i] = exchange_->CheckItem(static_cast<int64_t>(i), items_[i]);
    if (item_status_[i].ok()) {
      HW_RETURN_IF_ERROR(Finish(static_cast<int64_t>(i)));
    } else if (exchange_->RanAnywhere(static_cast<int64_t>(i))) {
      HW_RETURN_IF_ERROR(Undo(items_[i]));
    }
  }
  GiveUpExcess();
  return absl::OkStatus();
}

absl::Status AttentionStep::Finish(int64_t index) {
  const StepPhaseScope phase(StepPhase::kPlan);
  ActiveItem& item = items_[index];
  item.sequence->CommitAppend(item.spec.num_tokens, item.slots);
  if (!item.plans()) return absl::OkStatus();
  return RunPlan(cache_, *item.sequence, exchange_->InputOf(index, item), plans_wait_left_);
}

absl::Status AttentionStep::Undo(ActiveItem& item) {
  if (item.sequence == nullptr) return absl::OkStatus();
  return item.sequence->UndoAppend(item.spec.num_tokens, item.used_before, item.slots);
}

void AttentionStep::UndoAll(const absl::Status& reason) {
  for (size_t i = 0; i < items_.size(); ++i) {
    item_status_[i] = reason;
    const absl::Status undone = Undo(items_[i]);
    if (!undone.ok()) items_[i].sequence->Break(undone);
  }
  GiveUpExcess();
  items_.clear();
}

void AttentionStep::GiveUpExcess() {
  for (const ActiveItem& item : items_) {
    if (item.sequence == nullptr || !item.sequence->has_excess_reservation()) continue;
    cache_.workspace().TrimGains();
    item.sequence->GiveUpExcessReservation();
  }
}

}  // namespace heavywater
