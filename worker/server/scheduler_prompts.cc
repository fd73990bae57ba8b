// The scheduler's prompts.
#include <algorithm>
#include <span>

#include "absl/time/clock.h"
#include "cache_service/base/status.h"
#include "worker/server/scheduler.h"

namespace heavywater {

// In turn, so that a short prompt does not wait for a long one: batches that have begun,
// in the order in which they have, then the prompts that have not, as a new one.
std::vector<SequenceRun*> Scheduler::NextPrompts() {
  uint64_t lowest = 0;
  uint64_t next = 0;
  bool any_new = false;
  for (const auto& run : runs_) {
    if (run->prompt_done()) continue;
    const uint64_t batch = run->prompt_batch();
    if (batch == 0) {
      any_new = true;
      continue;
    }
    if (lowest == 0 || batch < lowest) lowest = batch;
    if (batch > last_prompt_batch_ && (next == 0 || batch < next)) next = batch;
  }
  if (next == 0) next = any_new ? BeginPromptBatch() : lowest;
  last_prompt_batch_ = next;
  std::vector<SequenceRun*> batch;
  for (const auto& run : runs_) {
    if (!run->prompt_done() && run->prompt_batch() == next && next != 0) batch.push_back(run.get());
  }
  return batch;
}

// The first prompt that has not begun, and others like it while they fit one chunk. A long
// one goes by itself, chunk by chunk. So do the shortest: products of so few tokens are
// rounded otherwise, and no answer may depend on what else runs.
uint64_t Scheduler::BeginPromptBatch() {
  const uint64_t batch = ++num_prompt_batches_;
  int64_t room = runner_.cache().options().max_step_tokens;
  bool alone = false;
  bool empty = true;
  for (const auto& run : runs_) {
    if (run->prompt_done() || run->prompt_batch() != 0) continue;
    const int64_t tokens = run->prompt_tokens();
    const bool fits = tokens > options_.lone_prompt_tokens && tokens <= room && !alone &&
                      run->stored_tokens() == 0;
    if (!empty && !fits) continue;
    alone = !fits;
    room -= tokens;
    run->set_prompt_batch(batch);
    empty = false;
    if (alone) break;
  }
  return batch;
}

// As many chunks as fit between two decode steps, at least one.
absl::StatusOr<bool> Scheduler::RunPrompts() {
  const absl::Time start = absl::Now();
  bool any = false;
  absl::Duration longest;
  do {
    const std::vector<SequenceRun*> batch = NextPrompts();
    if (batch.empty()) return any;
    const absl::Time chunk_start = absl::Now();
    HW_RETURN_IF_ERROR(RunPromptChunk(batch));
    any = true;
    longest = std::max(longest, absl::Now() - chunk_start);
  } while (absl::Now() + longest - start <= options_.max_stall);
  return any;
}

absl::Status Scheduler::RunPromptChunk(const std::vector<SequenceRun*>& batch) {
  v1::GroupCommand command;
  v1::PromptLayerCommand& chunk = *command.mutable_prompt_layer();
  chunk.set_layer(batch[0]->layer());
  chunk.set_first_token(batch[0]->chunk_begin());
  int64_t total = 0;
  for (const SequenceRun* run : batch) {
    chunk.add_sequence_ids(run->id());
    total += ChunkTokens(*run);
  }
  const absl::Time start = absl::Now();
  HW_ASSIGN_OR_RETURN(const CommandResult result, Execute(command));
  const absl::Duration took = absl::Now() - start;
  metrics_.ObserveStep("prompt", took);
  for (size_t i = 0; i < batch.size(); ++i) {
    SequenceRun& run = *batch[i];
    if (!result.item_status[i].ok()) {
      HW_RETURN_IF_ERROR(End(run, result.item_status[i]));
      continue;
    }
    // Its share of the time.
    const int64_t tokens = ChunkTokens(run);
    run.ChunkDone(tokens, runner_.cache().options().shape.num_layers,
                  took * (static_cast<double>(tokens) / static_cast<double>(total)));
    if (run.prompt_done()) HW_RETURN_IF_ERROR(StartDecode(run, result.logits[i]));
  }
  return absl::OkStatus();
}

int64_t Scheduler::ChunkTokens(const SequenceRun& run) const {
  return std::min<int64_t>(run.prompt_tokens() - run.chunk_begin(),
                           runner_.cache().options().max_step_tokens);
}

absl::Status Scheduler::StartDecode(SequenceRun& run, std::span<const float> logits) {
  HW_RETURN_IF_ERROR(RefreshFigures({&run}));
  HW_ASSIGN_OR_RETURN(const SequenceStats stats, runner_.cache().Stats(run.id()));
  metrics_.AddPromptTokens(stats.prompt_tokens);
  metrics_.AddPrefixTokens(run.stored_tokens());
  if (run.appending()) return absl::OkStatus();  // the first token follows the suffix
  const absl::Status taken = run.TakeLogits(logits, stats);
  if (!taken.ok()) return End(run, taken);
  metrics_.AddTokens(1);
  return run.finished() ? Complete(run) : absl::OkStatus();
}

}  // namespace heavywater
