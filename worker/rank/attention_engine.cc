#include "worker/rank/attention_engine.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/rank/check_finite.h"
#include "worker/rank/group_sum.h"
#include "worker/rank/sequence_cache.h"
#include "worker/rank/workspace.h"

namespace heavywater {

AttentionEngine::AttentionEngine(RankCache& cache, Communicator& communicator)
    : cache_(cache), communicator_(communicator), decode_(cache) {}

AttentionEngine::~AttentionEngine() {
  Abandon(absl::CancelledError("the engine has gone"));
  prompts_.clear();
  for (SequenceId sequence : cache_.sequence_ids()) cache_.Close(sequence).IgnoreError();
}

absl::Status AttentionEngine::Open(SequenceId sequence, const SequenceOptions& options) {
  return Agree(sequence, OpenHere(sequence, options));
}

absl::Status AttentionEngine::Fork(SequenceId sequence, AttentionEngine& from, SequenceId source) {
  absl::Status here = from.CheckNotInStep(source);
  if (here.ok()) here = cache_.Fork(sequence, from.cache_, source);
  return Agree(sequence, here);
}

absl::Status AttentionEngine::Truncate(SequenceId sequence, int64_t tokens) {
  HW_RETURN_IF_ERROR(CheckNotInStep(sequence));
  HW_ASSIGN_OR_RETURN(SequenceCache * cache, cache_.Find(sequence));
  return cache->Truncate(tokens);
}

absl::Status AttentionEngine::LoadState(SequenceId sequence, const SequenceOptions& options,
                                        std::span<const std::byte> state,
                                        std::span<const std::span<const std::byte>> pages,
                                        int64_t tokens_seen) {
  return Agree(sequence, cache_.LoadState(sequence, options, state, pages, tokens_seen));
}

absl::StatusOr<std::vector<std::byte>> AttentionEngine::SaveState(SequenceId sequence) {
  HW_RETURN_IF_ERROR(CheckNotInStep(sequence));
  HW_ASSIGN_OR_RETURN(const SequenceCache* cache, cache_.Find(sequence));
  return cache->SaveState();
}

absl::StatusOr<std::vector<std::byte>> AttentionEngine::ReadPage(SequenceId sequence,
                                                                 int64_t page) {
  HW_RETURN_IF_ERROR(CheckNotInStep(sequence));
  HW_ASSIGN_OR_RETURN(const SequenceCache* cache, cache_.Find(sequence));
  std::vector<std::byte> bytes;
  if (page >= 0) bytes = cache->host_pages().ReadPage(page);
  if (!bytes.empty()) return bytes;
  return absl::NotFoundError(
      absl::StrCat("page ", page, " of sequence ", sequence, " is not in host memory"));
}

// Open on every rank, or on none.
absl::Status AttentionEngine::Agree(SequenceId sequence, const absl::Status& here) {
  absl::Status agreed;
  HW_RETURN_IF_ERROR(AgreeOnStatus(here, cache_.backend(), communicator_, cache_.stream(), agreed));
  if (agreed.ok() || !here.ok()) return agreed;
  HW_RETURN_IF_ERROR(Close(sequence));
  return agreed;
}

absl::Status AttentionEngine::OpenHere(SequenceId sequence, const SequenceOptions& options) {
  HW_RETURN_IF_ERROR(cache_.Open(sequence, options));
  auto prompt = PromptAttention::Create(cache_, sequence);
  if (!prompt.ok()) {
    HW_RETURN_IF_ERROR(cache_.Close(sequence));
    return prompt.status();
  }
  prompts_[sequence].attention = *std::move(prompt);
  return absl::OkStatus();
}

absl::Status AttentionEngine::Close(SequenceId sequence) {
  HW_RETURN_IF_ERROR(CheckNotInStep(sequence));
  prompts_.erase(sequence);
  return cache_.Close(sequence);
}

absl::Status AttentionEngine::Begin(std::span<const EngineItem> items) {
  HW_RETURN_IF_ERROR(CheckOutOfStep());
  HW_RETURN_IF_ERROR(CheckItems(items));
  in_step_ = true;
  ++step_number_;
  items_.assign(items.begin(), items.end());
  item_status_.assign(items.size(), absl::OkStatus());
  planned_.assign(items.size(), false);
  first_rows_.clear();
  decode_items_.clear();
  num_rows_ = rows_done_ = 0;
  next_layer_ = 0;
  for (const EngineItem& item : items) {
    first_rows_.push_back(num_rows_);
    num_rows_ += item.num_tokens;
  }
  BeginDecode(first_rows_);
  return absl::OkStatus();
}

void AttentionEngine::BeginDecode(const std::vector<int64_t>& first_rows) {
  std::vector<StepItem> steps;
  std::vector<int64_t> rows;
  for (size_t i = 0; i < items_.size(); ++i) {
    if (is_prompt(i)) continue;
    planned_[i] = cache_.PlanDue(items_[i].sequence, items_[i].num_tokens);
    steps.push_back({.sequence = items_[i].sequence,
                     .first_position = items_[i].first_position,
                     .num_tokens = items_[i].num_tokens,
                     .plan_due = planned_[i],
                     .note_reads = items_[i].note_picks});
    rows.push_back(first_rows[i]);
    decode_items_.push_back(i);
  }
  if (steps.empty()) return;
  decode_.Begin(step_number_, steps, rows, num_rows_);
  for (size_t i = 0; i < decode_items_.size(); ++i) {
    item_status_[decode_items_[i]] = decode_.item_status()[i];
  }
}

absl::Status AttentionEngine::Attend(int layer, const AttentionRows& rows) {
  HW_ASSIGN_OR_RETURN(const int64_t count, CheckRows(layer, rows.queries.size(), rows.keys.size(),
                                                     rows.values.size(), rows.out.size()));
  absl::Status status = RunRows(layer, rows, count);
  if (!status.ok()) Abandon(status);
  return status;
}

absl::Status AttentionEngine::AttendHost(int layer, const HostRows& rows) {
  if (cache_.options().brings_rows) {
    return absl::FailedPreconditionError(
        "brings_rows is true: rows come to Attend(), on the device");
  }
  const auto size = [](auto span) { return static_cast<int64_t>(span.size()); };
  HW_ASSIGN_OR_RETURN(const int64_t count, CheckRows(layer, size(rows.queries), size(rows.keys),
                                                     size(rows.values), size(rows.out)));
  HW_RETURN_IF_ERROR(CheckFinite("queries", rows.queries));
  HW_RETURN_IF_ERROR(CheckFinite("keys", rows.keys));
  HW_RETURN_IF_ERROR(CheckFinite("values", rows.values));
  Workspace& workspace = cache_.workspace();
  Backend& backend = cache_.backend();
  const std::pair<DeviceSpan<float>, std::span<const float>> copies[] = {
      {workspace.queries(count), rows.queries},
      {workspace.keys(count), rows.keys},
      {workspace.values(count), rows.values}};
  for (const auto& [to, from] : copies) {
    HW_RETURN_IF_ERROR(backend.CopyToDevice(DeviceBytes(to), std::as_bytes(from), cache_.stream()));
  }
  HW_RETURN_IF_ERROR(Attend(layer, workspace.rows(count)));
  const DeviceSpan<const float> out = workspace.attention(count);
  HW_RETURN_IF_ERROR(
      backend.CopyToHost(std::as_writable_bytes(rows.out), DeviceBytes(out), cache_.stream()));
  return backend.Synchronize(cache_.stream());
}

absl::Status AttentionEngine::RunRows(int layer, const AttentionRows& rows, int64_t count) {
  if (!decode_items_.empty()) HW_RETURN_IF_ERROR(decode_.AppendAndAttend(layer, rows));
  for (size_t i = 0; i < items_.size(); ++i) {
    if (is_prompt(i)) HW_RETURN_IF_ERROR(RunPromptRows(i, layer, rows, count));
  }
  rows_done_ += count;
  return rows_done_ == num_rows_ ? CompleteLayer() : absl::OkStatus();
}

// The rows of a prompt that is alone come in parts, `count` of them now.
absl::Status AttentionEngine::RunPromptRows(size_t index, int layer, const AttentionRows& rows,
                                            int64_t count) {
  const EngineItem& item = items_[index];
  const int64_t own_count = items_.size() == 1 ? count : item.num_tokens;
  const AttentionRows own = rows.Sub(cache_.options().shape, first_rows_[index], own_count);
  Prompt& prompt = prompts_.at(item.sequence);
  if (prompt.failed.ok()) {
    prompt.attention->AppendAndAttend(
        layer, item.first_position + static_cast<Position>(rows_done_), own_count, own);
    if (prompt.attention->status().ok()) return absl::OkStatus();
  }
  return cache_.backend().Zero(DeviceBytes(own.out), cache_.stream());
}

absl::Status AttentionEngine::CompleteLayer() {
  for (size_t i = 0; i < items_.size(); ++i) {
    if (items_[i].phase == EnginePhase::kPromptLast) HW_RETURN_IF_ERROR(CompressPrompt(i));
  }
  ++next_layer_;
  rows_done_ = 0;
  return absl::OkStatus();
}

absl::Status AttentionEngine::CompressPrompt(size_t index) {
  Prompt& prompt = prompts_.at(items_[index].sequence);
  if (!prompt.failed.ok()) return absl::OkStatus();
  HW_RETURN_IF_ERROR(prompt.attention->BeforeReduce());
  HW_RETURN_IF_ERROR(Reduce(prompt.attention->reduce_buffer()));
  prompt.failed = prompt.attention->AfterReduce();
  return absl::OkStatus();
}

absl::Status AttentionEngine::Reduce(DeviceSpan<int64_t> buffer) {
  group_status_ = SumInPlace(buffer, communicator_, cache_.stream());
  return group_status_;
}

absl::Status AttentionEngine::End() {
  if (!in_step_) return absl::FailedPreconditionError("no step has begun, want Begin first");
  const int num_layers = cache_.options().shape.num_layers;
  if (next_layer_ != num_layers) {
    return absl::FailedPreconditionError(absl::StrCat("step ", step_number_, " has come to layer ",
                                                      next_layer_, ", want all ", num_layers,
                                                      " before it ends"));
  }
  absl::Status status = EndDecode();
  if (status.ok()) {
    EndPrompts();
  } else {
    BreakPrompts(status);
    item_status_.assign(items_.size(), status);
  }
  in_step_ = false;
  return status;
}

// Steps 4 and 5 of the sequences that decode.
absl::Status AttentionEngine::EndDecode() {
  if (decode_items_.empty()) return absl::OkStatus();
  absl::Status status = decode_.BeforeReduce();
  if (status.ok()) status = Reduce(decode_.reduce_buffer());
  if (!status.ok()) {
    decode_.UndoAll(status);
    return status;
  }
  HW_RETURN_IF_ERROR(decode_.AfterReduce());
  for (size_t i = 0; i < decode_items_.size(); ++i) {
    item_status_[decode_items_[i]] = decode_.item_status()[i];
  }
  return absl::OkStatus();
}

void AttentionEngine::EndPrompts() {
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!is_prompt(i)) continue;
    const auto found = prompts_.find(items_[i].sequence);
    Prompt& prompt = found->second;
    item_status_[i] = prompt.failed.ok() ? prompt.attention->status() : prompt.failed;
    prompt.tokens_appended += items_[i].num_tokens;
    if (prompt.attention->done()) prompts_.erase(found);
  }
}

void AttentionEngine::Abandon(const absl::Status& reason) {
  if (!in_step_) return;
  if (!decode_items_.empty()) decode_.UndoAll(reason);
  BreakPrompts(reason);
  item_status_.assign(items_.size(), reason);
  in_step_ = false;
}

// Part of the prompt's rows are in its layers.
void AttentionEngine::BreakPrompts(const absl::Status& reason) {
  for (size_t i = 0; i < items_.size(); ++i) {
    if (!is_prompt(i)) continue;
    Prompt& prompt = prompts_.at(items_[i].sequence);
    prompt.failed = reason;
    prompt.attention->Break(reason);
  }
}

absl::StatusOr<KeptSequence> AttentionEngine::Kept(SequenceId sequence) {
  HW_RETURN_IF_ERROR(CheckOutOfStep());
  KeptSequence kept;
  HW_ASSIGN_OR_RETURN(kept.report, cache_.Report(sequence, /*with_sets=*/true));
  HW_ASSIGN_OR_RETURN(SequenceCache * cache, cache_.Find(sequence));
  const SequenceRecall* recall = cache->recall();
  if (recall == nullptr) return kept;
  const KvShape& shape = cache_.options().shape;
  const int64_t first = cache->tokens_seen() - recall->noted_tokens();
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (int64_t token = 0; token < recall->noted_tokens(); ++token) {
      for (int head = 0; head < shape.num_kv_heads; ++head) {
        const std::span<const Position> picks = recall->picks(layer, token, head);
        if (picks.empty()) continue;
        kept.picks.push_back({.layer = layer,
                              .kv_head = shape.first_kv_head + head,
                              .query = static_cast<Position>(first + token),
                              .positions = {picks.begin(), picks.end()}});
      }
    }
  }
  return kept;
}

absl::StatusOr<std::vector<std::byte>> AttentionEngine::ReadKv(SequenceId sequence, int layer,
                                                               int kv_head, Position position) {
  HW_RETURN_IF_ERROR(CheckOutOfStep());
  return cache_.ReadKv(sequence, layer, kv_head, position);
}

}  // namespace heavywater
