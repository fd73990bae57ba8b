#include "worker/server/sequence_run.h"

#include <algorithm>
#include <utility>

#include "absl/time/clock.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/model/vector_ops.h"
#include "worker/server/policy_proto.h"
#include "worker/server/position_reads.h"

namespace heavywater {
namespace {

// Of a suffix in one step: through all layers, while other sequences wait.
constexpr int64_t kAppendTokens = 16;

void FillCounts(const SequenceStats& stats, v1::SequenceCounts& counts) {
  counts.set_tokens_seen(stats.tokens_seen);
  counts.set_tokens_resident(static_cast<double>(stats.tokens_resident));
  counts.set_tokens_demoted(static_cast<double>(stats.tokens_demoted));
  counts.set_tokens_dropped(static_cast<double>(stats.tokens_dropped));
}

void FillRecall(const SequenceFigures& figures, int world_size, v1::RecallCounts& counts) {
  counts.set_queries(figures.recall_queries);
  counts.set_reads(figures.recall_reads);
  counts.set_reads_max(figures.recall_reads_max);
  counts.set_promoted(static_cast<double>(figures.promoted) / world_size);
  counts.set_mass_missing(figures.mass_missing);
  counts.set_sketch_bytes(figures.sketch_bytes);
}

}  // namespace

double LogProbability(std::span<const float> logits, int32_t token) {
  return static_cast<double>(logits[static_cast<size_t>(token)]) -
         LogSumExp(logits.data(), static_cast<int64_t>(logits.size()));
}

absl::StatusOr<std::unique_ptr<SequenceRun>> SequenceRun::Create(
    std::shared_ptr<ServedGeneration> generation, const Tokenizer& tokenizer) {
  HW_ASSIGN_OR_RETURN(Sampler sampler, Sampler::Create(generation->request.sampling));
  return std::unique_ptr<SequenceRun>(
      new SequenceRun(std::move(generation), tokenizer, std::move(sampler)));
}

SequenceRun::SequenceRun(std::shared_ptr<ServedGeneration> generation, const Tokenizer& tokenizer,
                         Sampler sampler)
    : generation_(std::move(generation)),
      tokenizer_(tokenizer),
      sampler_(std::move(sampler)),
      decoder_(tokenizer),
      chunk_begin_(generation_->opened.prefix_tokens) {}

void SequenceRun::ChunkDone(int64_t chunk_tokens, int num_layers, absl::Duration took) {
  prompt_time_ += took;
  chunk_begin_ += chunk_tokens;
  if (chunk_begin_ < request().sequence.prompt_tokens) return;
  chunk_begin_ = stored_tokens();
  if (++layer_ < num_layers) return;
  prompt_done_ = true;
  tokens_seen_ = request().sequence.prompt_tokens;
  NoteSnapshot();
}

absl::Status SequenceRun::StartAt(int64_t tokens_seen) {
  prompt_done_ = true;
  tokens_seen_ = tokens_seen;
  NoteSnapshot();
  const int64_t after_prompt = tokens_seen - request().sequence.prompt_tokens;
  const auto suffix = static_cast<int64_t>(request().suffix.size());
  suffix_taken_ = static_cast<size_t>(std::min(after_prompt, suffix));
  if (appending()) return absl::OkStatus();
  // The token chosen last is not taken in yet.
  const std::vector<int32_t>& received = request().received;
  const int64_t chosen = after_prompt - suffix + 1;
  HW_CHECK(chosen >= 1 && chosen <= static_cast<int64_t>(received.size()));
  for (int64_t i = 0; i < chosen; ++i) {
    HW_RETURN_IF_ERROR(decoder_.Add(received[static_cast<size_t>(i)]).status());
  }
  new_tokens_ = static_cast<int>(chosen);
  next_token_ = received[static_cast<size_t>(chosen - 1)];
  // One draw a token, none where they are forced or greedy.
  if (request().forced.empty() && request().sampling.temperature > 0) {
    sampler_.Restore({.seed = request().sampling.seed, .draws = static_cast<uint64_t>(chosen)});
  }
  first_token_time_ = last_token_time_ = absl::Now();
  NoteFinish();
  return absl::OkStatus();
}

// Up to a plan, so that the append takes no more slots than an interval's, which
// are reserved: a suffix never fails for memory, whatever else runs.
int64_t SequenceRun::AppendTokens() const {
  const SequenceOptions& sequence = request().sequence;
  const int64_t interval = sequence.policy.plan_interval_steps;
  const int64_t since_plan = (tokens_seen_ - sequence.prompt_tokens) % interval;
  return std::min(kAppendTokens, interval - since_plan);
}

std::span<const int32_t> SequenceRun::NextTokens(int64_t limit) const {
  if (!appending()) return {&next_token_, 1};
  const std::span<const int32_t> left = std::span(request().suffix).subspan(suffix_taken_);
  // What was taken in before comes as it came then, as a rule.
  if (tokens_seen_ < generation_->opened.known_tokens) return left.first(1);
  const int64_t count = std::min({AppendTokens(), limit, static_cast<int64_t>(left.size())});
  return left.first(static_cast<size_t>(count));
}

void SequenceRun::TokensTaken(int64_t count, absl::Duration took) {
  tokens_seen_ += count;
  if (!appending()) return;
  suffix_taken_ += static_cast<size_t>(count);
  suffix_time_ += took;
}

void SequenceRun::AddReads(std::span<const int64_t> reads) {
  if (reads_.size() < reads.size()) reads_.resize(reads.size());
  for (size_t position = 0; position < reads.size(); ++position) {
    reads_[position] += reads[position];
  }
}

absl::Status SequenceRun::TakeLogits(std::span<const float> logits, const SequenceStats& stats) {
  HW_RETURN_IF_ERROR(ChooseToken(logits));
  const bool replayed = new_tokens_ < static_cast<int>(request().received.size());
  if (replayed) next_token_ = request().received[static_cast<size_t>(new_tokens_)];
  last_token_time_ = absl::Now();
  if (new_tokens_ == 0) first_token_time_ = last_token_time_;
  HW_ASSIGN_OR_RETURN(std::string text, decoder_.Add(next_token_));
  ++new_tokens_;
  NoteFinish();
  if (replayed) {
    reads_.clear();  // told with it
    return absl::OkStatus();
  }
  if (finished()) text += decoder_.Finish();
  Send(logits, text, stats);
  return absl::OkStatus();
}

absl::Status SequenceRun::ChooseToken(std::span<const float> logits) {
  if (!request().forced.empty()) {
    next_token_ = request().forced[static_cast<size_t>(new_tokens_)];
    return absl::OkStatus();
  }
  HW_ASSIGN_OR_RETURN(next_token_, sampler_.Sample(logits));
  return absl::OkStatus();
}

void SequenceRun::NoteFinish() {
  const bool forced = !request().forced.empty();
  if (!forced && !request().ignore_eos && tokenizer_.IsEndOfTurn(next_token_)) {
    finish_reason_ = "eos";
  } else if (new_tokens_ == request().max_new_tokens) {
    finish_reason_ = forced ? "forced" : "length";
  }
}

void SequenceRun::Send(std::span<const float> logits, const std::string& text,
                       const SequenceStats& stats) {
  v1::GenerateResponse response;
  const int index = new_tokens_ - 1;
  if (index == 0) response.set_sequence_id(id());
  response.set_index(index);
  response.set_token(next_token_);
  response.set_text(text);
  response.set_logprob(static_cast<float>(LogProbability(logits, next_token_)));
  if (request().return_logits) {
    response.set_logits(logits.data(), logits.size() * sizeof(float));
  }
  FillReads(reads_, *response.mutable_reads());
  reads_.clear();
  FillCounts(stats, *response.mutable_counts());
  response.set_device_bytes(figures_.device_bytes);
  response.set_host_bytes(figures_.host_bytes);
  generation_->NoteToken(next_token_);
  responses().Push(std::move(response));
}

std::string SequenceRun::WhyNotReused() const {
  if (generation_->opened.restored()) return "the sequence went on from its committed state";
  if (!request().prefix.why_none.empty()) return request().prefix.why_none;
  return "no stored prompt begins alike";
}

void SequenceRun::SendSummary(const SequenceStats& stats, int world_size, int64_t plan) {
  v1::GenerateResponse response;
  v1::GenerateSummary& summary = *response.mutable_summary();
  summary.set_finish_reason(finish_reason_);
  *summary.mutable_budget() = BudgetToProto(request().sequence.policy, stats.budget);
  summary.set_seed(request().sampling.seed);
  FillCounts(stats, *summary.mutable_counts());
  // Ranks whose host memory filled at different times differ.
  summary.mutable_counts()->set_tokens_demoted(static_cast<double>(figures_.tokens_demoted) /
                                               world_size);
  summary.mutable_counts()->set_tokens_dropped(static_cast<double>(figures_.tokens_dropped) /
                                               world_size);
  summary.set_tensor_parallel(world_size);
  summary.set_device_bytes_peak(figures_.device_bytes_peak);
  summary.set_device_bytes_prompt_peak(figures_.device_bytes_prompt_peak);
  summary.set_host_bytes(figures_.host_bytes);
  summary.set_full_cache_bytes(figures_.full_cache_bytes);
  summary.set_prompt_tokens(stats.prompt_tokens);
  summary.set_new_tokens(new_tokens_);
  summary.set_prefix_tokens_reused(stored_tokens());
  if (stored_tokens() == 0) summary.set_prefix_not_reused(WhyNotReused());
  summary.set_suffix_tokens(static_cast<int64_t>(suffix_taken_));
  summary.set_suffix_seconds(absl::ToDoubleSeconds(suffix_time_));
  summary.set_prompt_seconds(absl::ToDoubleSeconds(prompt_time_));
  summary.set_decode_seconds(absl::ToDoubleSeconds(last_token_time_ - first_token_time_));
  summary.set_plan(plan);
  if (request().sequence.policy.recall.enabled) {
    FillRecall(figures_, world_size, *summary.mutable_recall());
  }
  response.set_device_bytes(figures_.device_bytes);
  response.set_host_bytes(figures_.host_bytes);
  *response.mutable_counts() = summary.counts();
  responses().Push(std::move(response));
}

}  // namespace heavywater
