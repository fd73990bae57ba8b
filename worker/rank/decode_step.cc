#include "worker/rank/decode_step.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/rank/plan.h"
#include "worker/rank/sequence_cache.h"
#include "worker/rank/step_exchange.h"
#include "worker/rank/workspace.h"

namespace heavywater {

DecodeStep::DecodeStep(RankCache& cache, Model& model)
    : cache_(cache), model_(model), exchange_(std::make_unique<StepExchange>(cache)) {
  HW_CHECK(model.hidden_size() == cache.options().hidden_size);
  HW_CHECK(model.vocab_size() == cache.options().vocab_size);
}

DecodeStep::~DecodeStep() = default;

absl::Status DecodeStep::Run(const StepDescriptor& descriptor, Communicator& communicator) {
  HW_RETURN_IF_ERROR(Before(descriptor));
  absl::Status reduced = communicator.AllReduceSum(reduce_buffer(), cache_.stream());
  if (reduced.ok()) reduced = communicator.Settle(cache_.stream());
  if (!reduced.ok()) {
    UndoAll(reduced);
    return reduced;
  }
  HW_RETURN_IF_ERROR(After());
  return communicator.Settle(cache_.stream());  // the logits' gather
}

// Steps 1 to 3 of each layer, then this rank's part of what is reduced (4).
absl::Status DecodeStep::Before(const StepDescriptor& descriptor) {
  HW_RETURN_IF_ERROR(Check(descriptor));
  descriptor_ = descriptor;
  Admit();
  exchange_->Layout(descriptor.step, items_);
  absl::Status status = RunLayers();
  if (status.ok()) status = exchange_->Fill(items_);
  if (!status.ok()) UndoAll(status);
  return status;
}

DeviceSpan<int64_t> DecodeStep::reduce_buffer() { return exchange_->reduce_buffer(); }

// Step 5: agree, then plan.
absl::Status DecodeStep::After() {
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
  return ComputeLogits();
}

// What every rank sees alike, since it only depends on the descriptor and
// options that all have in common.
absl::Status DecodeStep::Check(const StepDescriptor& descriptor) const {
  int64_t tokens = 0;
  std::set<SequenceId> seen;
  for (const StepItem& item : descriptor.items) {
    if (item.num_tokens < 1) {
      return absl::InvalidArgumentError(absl::StrCat("num_tokens of sequence ", item.sequence,
                                                     " is ", item.num_tokens, ", want at least 1"));
    }
    if (!seen.insert(item.sequence).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("sequence ", item.sequence, " is twice in step ", descriptor.step));
    }
    tokens += item.num_tokens;
  }
  if (tokens == 0 || tokens > cache_.options().max_step_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("step ", descriptor.step, " has ", tokens,
                                                   " tokens, want 1 to ",
                                                   cache_.options().max_step_tokens));
  }
  if (tokens != static_cast<int64_t>(descriptor.tokens.size())) {
    return absl::InvalidArgumentError(absl::StrCat("step ", descriptor.step, " brings ",
                                                   descriptor.tokens.size(), " tokens, want ",
                                                   tokens, " for its items"));
  }
  return absl::OkStatus();
}

// An item that cannot run here goes through the step without touching its
// sequence: the other ranks learn of it in the reduce.
void DecodeStep::Admit() {
  items_.clear();
  positions_.clear();
  item_status_.assign(descriptor_.items.size(), absl::OkStatus());
  logits_ = DeviceSpan<const float>();
  extra_logits_rows_ = 0;
  for (const StepItem& spec : descriptor_.items) {
    ActiveItem& item = items_.emplace_back();
    item.spec = spec;
    item.first_row = static_cast<int64_t>(positions_.size());
    item.status = AdmitItem(item);
    for (int64_t i = 0; i < spec.num_tokens; ++i) {
      positions_.push_back(spec.first_position + static_cast<Position>(i));
    }
  }
}

absl::Status DecodeStep::AdmitItem(ActiveItem& item) {
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

absl::Status DecodeStep::RunLayers() {
  HW_RETURN_IF_ERROR(
      model_.Embed(descriptor_.tokens, cache_.workspace().hidden(num_tokens()), cache_.stream()));
  for (int layer = 0; layer < cache_.options().shape.num_layers; ++layer) {
    HW_RETURN_IF_ERROR(RunLayer(layer));
  }
  return absl::OkStatus();
}

absl::Status DecodeStep::RunLayer(int layer) {
  const int64_t rows = num_tokens();
  Workspace& workspace = cache_.workspace();
  HW_RETURN_IF_ERROR(model_.ComputeQkv(layer, workspace.hidden(rows), positions_,
                                       workspace.queries(rows), workspace.keys(rows),
                                       workspace.values(rows), cache_.stream()));
  HW_RETURN_IF_ERROR(AppendKv(layer));
  HW_RETURN_IF_ERROR(ObserveQueries(layer));
  HW_RETURN_IF_ERROR(Attend(layer));
  return model_.FinishLayer(layer, workspace.attention(rows), workspace.hidden(rows),
                            cache_.stream());
}

absl::Status DecodeStep::AppendKv(int layer) {
  const KvShape& shape = cache_.options().shape;
  std::vector<AppendItem> appends;
  std::vector<HostRow> host_rows(num_tokens() * shape.num_kv_heads);
  for (ActiveItem& item : items_) {
    if (!item.status.ok()) continue;
    const size_t taken = item.slots.size();
    item.sequence->TakeSlots(layer, item.spec.num_tokens, item.slots);
    AppendItem append;
    append.layer = item.sequence->View(layer);
    append.first_token = item.first_row;
    append.num_tokens = item.spec.num_tokens;
    append.first_position = item.spec.first_position;
    append.slots = std::span(item.slots).subspan(taken);
    appends.push_back(append);
    const int64_t first = item.spec.first_position;
    item.sequence->host_pages().FillRows(
        layer, first, first + item.spec.num_tokens,
        std::span(host_rows).subspan(item.first_row * shape.num_kv_heads));
  }
  AppendParams params;
  params.items = appends;
  params.keys = cache_.workspace().keys(num_tokens());
  params.values = cache_.workspace().values(num_tokens());
  params.host_rows = host_rows;
  return cache_.backend().Append(shape, params, cache_.stream());
}

// Until a sequence has a sketch, its queries tell which channels it should have.
absl::Status DecodeStep::ObserveQueries(int layer) {
  const KvShape& shape = cache_.options().shape;
  const int64_t width = int64_t{shape.num_query_heads} * shape.head_dim;
  const DeviceSpan<float> queries = cache_.workspace().queries(num_tokens());
  for (const ActiveItem& item : items_) {
    if (!item.status.ok()) continue;
    SequenceRecall* recall = item.sequence->recall();
    if (recall == nullptr || recall->sketched()) continue;
    HW_RETURN_IF_ERROR(
        recall->Observe(layer, queries.Sub(item.first_row * width, item.spec.num_tokens * width),
                        item.spec.num_tokens, item.spec.first_position));
  }
  return absl::OkStatus();
}

// Steps 2 and 3: one pass over the slots and what recall picks.
absl::Status DecodeStep::Attend(int layer) {
  std::vector<AttendItem> attends;
  int64_t capacity = 0;
  RecallLimits limits;
  for (const ActiveItem& item : items_) {
    if (!item.status.ok()) continue;
    AttendItem attend;
    attend.layer = item.sequence->View(layer);
    attend.first_token = item.first_row;
    attend.num_tokens = item.spec.num_tokens;
    attend.first_position = item.spec.first_position;
    attend.accumulate_gains = item.sequence->budget().uses_scores;
    if (item.sequence->recall() != nullptr) attend.recall = item.sequence->recall()->View(layer);
    if (attend.recall != nullptr) limits.Raise(LimitsOf(*attend.recall));
    attends.push_back(attend);
    capacity = std::max(capacity, attend.layer.capacity);
  }
  AttendParams params;
  params.items = attends;
  params.queries = cache_.workspace().queries(num_tokens());
  params.out = cache_.workspace().attention(num_tokens());
  params.scale = cache_.attention_scale();
  HW_ASSIGN_OR_RETURN(params.scratch,
                      cache_.workspace().Scratch(cache_.backend().AttendScratchBytes(
                          cache_.options().shape, capacity, limits)));
  if (attends.size() < items_.size()) {  // rows of items that do not run
    HW_RETURN_IF_ERROR(cache_.backend().Zero(DeviceBytes(params.out), cache_.stream()));
  }
  return cache_.backend().Attend(cache_.options().shape, params, cache_.stream());
}

absl::Status DecodeStep::Finish(int64_t index) {
  ActiveItem& item = items_[index];
  item.sequence->CommitAppend(item.spec.num_tokens, item.slots);
  if (!item.plans()) return absl::OkStatus();
  return RunPlan(cache_, *item.sequence, exchange_->InputOf(index, item));
}

absl::Status DecodeStep::Undo(ActiveItem& item) {
  if (item.sequence == nullptr) return absl::OkStatus();
  return item.sequence->UndoAppend(item.spec.num_tokens, item.used_before, item.slots);
}

void DecodeStep::UndoAll(const absl::Status& reason) {
  for (size_t i = 0; i < items_.size(); ++i) {
    item_status_[i] = reason;
    const absl::Status undone = Undo(items_[i]);
    if (!undone.ok()) items_[i].sequence->Break(undone);
  }
  GiveUpExcess();
}

void DecodeStep::GiveUpExcess() {
  for (const ActiveItem& item : items_) {
    if (item.sequence == nullptr || !item.sequence->has_excess_reservation()) continue;
    cache_.workspace().TrimGains();
    item.sequence->GiveUpExcessReservation();
  }
}

absl::Status DecodeStep::ComputeLogits() {
  int64_t rows = 0;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!item_status_[i].ok()) continue;
    items_[i].first_logits_row = rows;
    rows += items_[i].logits_rows();
  }
  if (rows == 0) return absl::OkStatus();
  const DeviceSpan<float> hidden = cache_.workspace().last_hidden(rows);
  HW_RETURN_IF_ERROR(GatherLastHidden(hidden));
  HW_ASSIGN_OR_RETURN(const DeviceSpan<float> logits, cache_.workspace().Logits(rows));
  logits_ = logits;
  return model_.ComputeLogits(hidden, logits, cache_.stream());
}

absl::Status DecodeStep::GatherLastHidden(DeviceSpan<float> to) {
  const int64_t width = model_.hidden_size();
  const DeviceSpan<float> from = cache_.workspace().hidden(num_tokens());
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!item_status_[i].ok()) continue;
    const ActiveItem& item = items_[i];
    const int64_t rows = item.logits_rows();
    const int64_t first = item.first_row + item.spec.num_tokens - rows;
    HW_RETURN_IF_ERROR(cache_.backend().CopyOnDevice(
        DeviceBytes(to.Sub(item.first_logits_row * width, rows * width)),
        DeviceBytes(from.Sub(first * width, rows * width)), cache_.stream()));
  }
  return absl::OkStatus();
}

DeviceSpan<const float> DecodeStep::logits(int item) const {
  HW_CHECK(item_status_[item].ok() && !logits_.empty());
  const int64_t width = model_.vocab_size();
  return logits_.Sub(items_[item].first_logits_row * width, items_[item].logits_rows() * width);
}

}  // namespace heavywater
