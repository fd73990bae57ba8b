// What an engine is refused, before anything has changed. All of it looks alike on
// every rank that is called alike.
#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/rank/attention_engine.h"
#include "worker/rank/sequence_cache.h"

namespace heavywater {
namespace {

absl::Status CheckSize(const char* field, int64_t got, int64_t rows, int64_t width) {
  if (got == rows * width) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " has ", got, " numbers, want ", rows,
                                                 " rows of ", width, ", ", rows * width));
}

}  // namespace

absl::Status AttentionEngine::CheckOutOfStep() const {
  if (!in_step_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("step ", step_number_, " has not ended, want its layers and End first"));
}

absl::Status AttentionEngine::CheckNotInStep(SequenceId sequence) const {
  const auto takes_part = [sequence](const EngineItem& item) { return item.sequence == sequence; };
  if (!in_step_ || std::none_of(items_.begin(), items_.end(), takes_part)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("sequence ", sequence, " is in step ", step_number_, ", which has not ended"));
}

absl::Status AttentionEngine::CheckItems(std::span<const EngineItem> items) const {
  if (items.empty()) return absl::InvalidArgumentError("items is empty, want at least one");
  std::set<SequenceId> seen;
  int64_t rows = 0;
  for (const EngineItem& item : items) {
    HW_RETURN_IF_ERROR(CheckItem(item));
    if (!seen.insert(item.sequence).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("items has sequence ", item.sequence, " twice, want it once in a step"));
    }
    rows += item.num_tokens;
  }
  const bool prompt_alone = items.size() == 1 && items[0].phase != EnginePhase::kDecode;
  const int64_t limit = cache_.options().max_step_tokens;
  if (prompt_alone || rows <= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("items have ", rows,
                                                 " tokens together, want at most max_step_tokens, ",
                                                 limit, ", or one prompt alone"));
}

absl::Status AttentionEngine::CheckItem(const EngineItem& item) const {
  HW_ASSIGN_OR_RETURN(const SequenceCache* sequence, cache_.Find(item.sequence));
  const SequenceOptions& options = sequence->options();
  if (item.num_tokens < 1 || item.num_tokens > options.max_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("num_tokens of sequence ", item.sequence, " is ",
                                                   item.num_tokens, ", want 1 to ",
                                                   options.max_tokens, " (max_tokens)"));
  }
  const auto prompt = prompts_.find(item.sequence);
  if (prompt != prompts_.end()) return CheckPromptItem(item, prompt->second);
  if (item.phase != EnginePhase::kDecode) {
    return absl::FailedPreconditionError(absl::StrCat("phase of sequence ", item.sequence,
                                                      " is PROMPT, but its prompt has ended; "
                                                      "want DECODE"));
  }
  // Where the prompt's end has failed on this rank alone, the step tells the others.
  if (!sequence->prompt_done()) return absl::OkStatus();
  if (item.first_position != sequence->tokens_seen()) {
    return absl::InvalidArgumentError(absl::StrCat("first_position of sequence ", item.sequence,
                                                   " is ", item.first_position, ", want ",
                                                   sequence->tokens_seen(), " (tokens seen)"));
  }
  if (sequence->tokens_seen() + item.num_tokens <= options.max_tokens) return absl::OkStatus();
  return absl::OutOfRangeError(absl::StrCat(
      item.num_tokens, " tokens after the ", sequence->tokens_seen(), " seen of sequence ",
      item.sequence, ", want at most max_tokens, ", options.max_tokens));
}

absl::Status AttentionEngine::CheckPromptItem(const EngineItem& item, const Prompt& prompt) const {
  HW_RETURN_IF_ERROR(prompt.failed);
  const int64_t want = prompt.attention->num_tokens();
  if (item.phase == EnginePhase::kDecode) {
    return absl::FailedPreconditionError(
        absl::StrCat("phase of sequence ", item.sequence, " is DECODE, but its prompt has ",
                     prompt.tokens_appended, " of ", want, " tokens; want PROMPT or PROMPT_LAST"));
  }
  if (item.first_position != prompt.tokens_appended) {
    return absl::InvalidArgumentError(absl::StrCat("first_position of sequence ", item.sequence,
                                                   " is ", item.first_position, ", want ",
                                                   prompt.tokens_appended, " (tokens appended)"));
  }
  const int64_t end = prompt.tokens_appended + item.num_tokens;
  const bool last = item.phase == EnginePhase::kPromptLast;
  if (last ? end != want : end >= want) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the prompt of sequence ", item.sequence, " comes to ", end, " tokens with ",
        last ? "PROMPT_LAST, want " : "PROMPT, want fewer than ", want, " (prompt_tokens)"));
  }
  const bool in_steps = (*cache_.Find(item.sequence))->options().prompt_in_steps;
  if (last || in_steps) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("phase of sequence ", item.sequence,
                   " is PROMPT, which it was not opened for; want prompt_in_steps at its opening, "
                   "or all of the prompt as PROMPT_LAST"));
}

absl::StatusOr<int64_t> AttentionEngine::CheckRows(int layer, int64_t queries, int64_t keys,
                                                   int64_t values, int64_t out) const {
  if (!in_step_) return absl::FailedPreconditionError("no step has begun, want Begin first");
  const KvShape& shape = cache_.options().shape;
  const bool ended = next_layer_ == shape.num_layers;
  if (ended || layer != next_layer_) {
    return absl::FailedPreconditionError(
        ended
            ? absl::StrCat("layer is ", layer, ", but step ", step_number_, " has had all ",
                           shape.num_layers, "; want End")
            : absl::StrCat("layer is ", layer, ", want ", next_layer_, " in step ", step_number_));
  }
  const int64_t query_width = int64_t{shape.num_query_heads} * shape.head_dim;
  const int64_t kv_width = int64_t{shape.num_kv_heads} * shape.head_dim;
  // Of a prompt that is alone rows may come in parts.
  const int64_t limit = std::min<int64_t>(rows_left(), cache_.options().max_step_tokens);
  const bool in_parts = items_.size() == 1 && is_prompt(0);
  const int64_t rows = in_parts ? queries / query_width : num_rows_;
  if (rows < 1 || rows > limit) {
    return absl::InvalidArgumentError(absl::StrCat("queries has ", queries, " numbers, want 1 to ",
                                                   limit, " rows of ", query_width));
  }
  HW_RETURN_IF_ERROR(CheckSize("queries", queries, rows, query_width));
  HW_RETURN_IF_ERROR(CheckSize("keys", keys, rows, kv_width));
  HW_RETURN_IF_ERROR(CheckSize("values", values, rows, kv_width));
  HW_RETURN_IF_ERROR(CheckSize("out", out, rows, query_width));
  return rows;
}

}  // namespace heavywater
