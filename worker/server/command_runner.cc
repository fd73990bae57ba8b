#include "worker/server/command_runner.h"

#include <algorithm>
#include <functional>
#include <span>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/base/step_phases.h"
#include "cache_service/runtime/logging.h"
#include "worker/cache/read_device.h"
#include "worker/rank/group_sum.h"
#include "worker/rank/sequence_cache.h"
#include "worker/server/policy_proto.h"

namespace heavywater {
namespace {

StepDescriptor ToDescriptor(const v1::DecodeCommand& command) {
  StepDescriptor descriptor;
  descriptor.step = command.step();
  for (const auto& item : command.items()) {
    descriptor.items.push_back({.sequence = item.sequence_id(),
                                .first_position = item.first_position(),
                                .num_tokens = item.tokens_size(),
                                .plan_due = item.plan_due(),
                                .note_reads = item.return_reads()});
    descriptor.tokens.insert(descriptor.tokens.end(), item.tokens().begin(), item.tokens().end());
  }
  return descriptor;
}

}  // namespace

CommandRunner::CommandRunner(RankCache& cache, Model& model, Communicator& communicator,
                             PlanReports& reports, CommandRunnerOptions options)
    : cache_(cache),
      model_(model),
      communicator_(communicator),
      reports_(reports),
      options_(std::move(options)),
      step_(cache, model) {}

CommandRunner::~CommandRunner() {
  prompts_.clear();
  for (SequenceId sequence : cache_.sequence_ids()) cache_.Close(sequence).IgnoreError();
}

absl::StatusOr<CommandResult> CommandRunner::Run(const v1::GroupCommand& command) {
  const StepPhaseScope phase(StepPhase::kOther);
  switch (command.command_case()) {
    case v1::GroupCommand::kOpen:
      return Open(command.open());
    case v1::GroupCommand::kPromptLayer:
      return RunPrompt(command.prompt_layer());
    case v1::GroupCommand::kDecode:
      return Decode(command.decode());
    case v1::GroupCommand::kClose:
      return Close(command.close());
    case v1::GroupCommand::kFigures:
      return SumFigures(command.figures());
    case v1::GroupCommand::kIdle:
    case v1::GroupCommand::kShutdown:
      return CommandResult{};
    case v1::GroupCommand::kRestore:
      return Restore(command.restore());
    case v1::GroupCommand::COMMAND_NOT_SET:
      break;
  }
  return absl::FailedPreconditionError("group command of a kind that this rank does not know");
}

absl::StatusOr<CommandResult> CommandRunner::Open(const v1::OpenCommand& command) {
  const absl::Status here = OpenHere(command);
  if (!here.ok()) {
    LogInfo("sequence does not open",
            {{"sequence", command.sequence_id()}, {"error", here.ToString()}});
  }
  CommandResult result;
  HW_RETURN_IF_ERROR(
      AgreeOnStatus(here, cache_.backend(), communicator_, cache_.stream(), result.status));
  if (result.status.ok() || !here.ok()) return result;
  prompts_.erase(command.sequence_id());
  reports_.Close(command.sequence_id());  // nothing was written: nobody need know
  HW_RETURN_IF_ERROR(cache_.Close(command.sequence_id()));
  return result;
}

absl::Status CommandRunner::OpenCache(const v1::OpenCommand& command) {
  SequenceOptions options;
  HW_ASSIGN_OR_RETURN(options.policy, PolicyFromProto(command.policy()));
  HW_ASSIGN_OR_RETURN(options.on_host_full, ParseOnHostFull(command.on_host_full()));
  options.prompt_tokens = command.prompt_size();
  options.max_tokens = command.max_tokens();
  options.stored_tokens = command.stored_tokens();
  if (options.stored_tokens > 0 && (options_.recorder != nullptr || options_.traces != nullptr)) {
    return absl::FailedPreconditionError(
        "this rank has dump_dir or record_dir, which want every row of a prompt computed");
  }
  if (options_.tier == nullptr) return cache_.Open(command.sequence_id(), options);
  options_.tier->Expect(command.sequence_id(), command.max_tokens(),
                        absl::Milliseconds(command.lease_ms()));
  const absl::Status opened = cache_.Open(command.sequence_id(), options);
  if (!opened.ok()) options_.tier->Forget(command.sequence_id());
  return opened;
}

absl::Status CommandRunner::OpenHere(const v1::OpenCommand& command) {
  HW_RETURN_IF_ERROR(OpenCache(command));
  std::vector<int32_t> prompt(command.prompt().begin(), command.prompt().end());
  auto pass = PromptPass::Create(cache_, model_, command.sequence_id(), prompt);
  if (!pass.ok()) {
    HW_RETURN_IF_ERROR(cache_.Close(command.sequence_id()));
    return pass.status();
  }
  prompts_[command.sequence_id()] = *std::move(pass);
  if (options_.traces != nullptr) {
    HW_ASSIGN_OR_RETURN(const SequenceCache* opened, cache_.Find(command.sequence_id()));
    options_.traces->Begin(command.sequence_id(), opened->options());
  }
  reports_.AddTokens(command.sequence_id(), 0, prompt);
  return absl::OkStatus();
}

absl::StatusOr<CommandResult> CommandRunner::Restore(const v1::RestoreCommand& command) {
  const SequenceId sequence = command.sequence_id();
  const absl::Status here = RestoreHere(command);
  if (!here.ok()) {
    LogWarn("sequence is not restored", {{"sequence", sequence}, {"error", here.ToString()}});
  }
  CommandResult result;
  HW_RETURN_IF_ERROR(
      AgreeOnStatus(here, cache_.backend(), communicator_, cache_.stream(), result.status));
  if (result.status.ok()) {
    reports_.Resume(sequence, command.plan(), command.tokens_seen(), command.incarnation());
  } else if (here.ok()) {
    HW_RETURN_IF_ERROR(cache_.Close(sequence));
  }
  return result;
}

absl::Status CommandRunner::RestoreHere(const v1::RestoreCommand& command) {
  if (options_.tier == nullptr || options_.snapshots == nullptr) {
    return absl::FailedPreconditionError("this worker has no cache service to restore from");
  }
  SequenceOptions options;
  HW_ASSIGN_OR_RETURN(options.policy, PolicyFromProto(command.policy()));
  HW_ASSIGN_OR_RETURN(options.on_host_full, ParseOnHostFull(command.on_host_full()));
  options.prompt_tokens = command.prompt_tokens();
  options.max_tokens = command.max_tokens();
  const SequenceId sequence = command.sequence_id();
  HW_ASSIGN_OR_RETURN(const SequenceSnapshot snapshot,
                      options_.snapshots->Read(sequence, command.plan()));
  if (snapshot.tokens_seen != command.tokens_seen()) {
    return absl::DataLossError(absl::StrCat("snapshot has seen ", snapshot.tokens_seen,
                                            " tokens, want ", command.tokens_seen()));
  }
  options_.tier->Expect(sequence, command.max_tokens(), absl::Milliseconds(command.lease_ms()));
  const absl::Status restored = cache_.Restore(sequence, options, snapshot, command.known_tokens());
  if (!restored.ok()) options_.tier->Forget(sequence);
  return restored;
}

absl::StatusOr<PromptPass*> CommandRunner::FindPrompt(SequenceId sequence, int layer) const {
  const auto found = prompts_.find(sequence);
  if (found != prompts_.end() && found->second->layer() == layer) return found->second.get();
  return absl::FailedPreconditionError(absl::StrCat(
      "rank 0 runs layer ", layer, " of the prompt of sequence ", sequence, ", this rank is at ",
      found == prompts_.end() ? "none" : absl::StrCat("layer ", found->second->layer())));
}

absl::StatusOr<std::vector<PromptPass*>> CommandRunner::FindPrompts(
    const v1::PromptLayerCommand& command) {
  std::vector<PromptPass*> passes;
  std::vector<KvRecorder::Rows> rows;
  const int64_t first = command.first_token();
  for (const SequenceId sequence : command.sequence_ids()) {
    HW_ASSIGN_OR_RETURN(PromptPass * pass, FindPrompt(sequence, command.layer()));
    passes.push_back(pass);
    rows.push_back(
        {sequence, static_cast<Position>(first),
         std::min<int64_t>(cache_.options().max_step_tokens, pass->num_tokens() - first)});
  }
  ExpectRows(std::move(rows));
  return passes;
}

absl::StatusOr<CommandResult> CommandRunner::RunPrompt(const v1::PromptLayerCommand& command) {
  HW_ASSIGN_OR_RETURN(const std::vector<PromptPass*> passes, FindPrompts(command));
  CommandResult result;
  if (passes.empty()) return result;
  HW_RETURN_IF_ERROR(passes.size() == 1 ? passes[0]->RunChunk()
                                        : PromptPass::RunLayerTogether(passes));
  result.item_status.resize(passes.size());
  result.logits.resize(passes.size());
  if (passes[0]->layer_complete()) HW_RETURN_IF_ERROR(CompleteLayer(passes, result));
  return result;
}

absl::Status CommandRunner::CompleteLayer(std::span<PromptPass* const> passes,
                                          CommandResult& result) {
  for (size_t i = 0; i < passes.size(); ++i) {
    PromptPass& pass = *passes[i];
    HW_RETURN_IF_ERROR(SumInPlace(pass.reduce_buffer(), communicator_, cache_.stream()));
    result.item_status[i] = pass.LayerAfter();
    if (!result.item_status[i].ok() || !pass.done()) continue;
    HW_ASSIGN_OR_RETURN(result.logits[i], EndPrompt(pass));
  }
  return absl::OkStatus();
}

// The pass is gone afterwards.
absl::StatusOr<std::vector<float>> CommandRunner::EndPrompt(PromptPass& pass) {
  const SequenceId sequence = pass.sequence();
  HW_ASSIGN_OR_RETURN(const DeviceSpan<const float> logits, pass.ComputeLogits());
  HW_RETURN_IF_ERROR(communicator_.Settle(cache_.stream()));
  HW_ASSIGN_OR_RETURN(std::vector<float> copy, CopyLogits(logits));
  prompts_.erase(sequence);
  HW_RETURN_IF_ERROR(
      reports_.Report(sequence, /*with_sets=*/true, options_.take_snapshots).status());
  return copy;
}

absl::StatusOr<CommandResult> CommandRunner::Decode(const v1::DecodeCommand& command) {
  std::vector<KvRecorder::Rows> rows;
  for (const auto& item : command.items()) {
    rows.push_back({item.sequence_id(), item.first_position(), item.tokens_size()});
  }
  ExpectRows(std::move(rows));
  CommandResult result;
  result.status = step_.Run(ToDescriptor(command), communicator_);
  if (!result.status.ok()) return result;
  result.item_status.assign(step_.item_status().begin(), step_.item_status().end());
  result.logits.resize(result.item_status.size());
  for (int i = 0; i < command.items_size(); ++i) {
    if (!result.item_status[static_cast<size_t>(i)].ok()) continue;
    HW_ASSIGN_OR_RETURN(result.logits[static_cast<size_t>(i)], CopyLogits(step_.logits(i)));
    HW_RETURN_IF_ERROR(AfterItem(command.items(i)));
  }
  HW_RETURN_IF_ERROR(SumReads(command, result));
  return result;
}

// What a step can read lies before its tokens: so many numbers for each item, on
// every rank, also where the rank cannot read.
absl::Status CommandRunner::SumReads(const v1::DecodeCommand& command, CommandResult& result) {
  std::vector<int64_t> numbers;
  result.reads.resize(result.item_status.size());
  for (int i = 0; i < command.items_size(); ++i) {
    const auto& item = command.items(i);
    if (!item.return_reads() || !result.item_status[static_cast<size_t>(i)].ok()) continue;
    HW_ASSIGN_OR_RETURN(SequenceCache * sequence, cache_.Find(item.sequence_id()));
    std::vector<int64_t>& reads = result.reads[static_cast<size_t>(i)];
    if (sequence->recall() != nullptr) {
      reads.assign(sequence->recall()->reads().begin(), sequence->recall()->reads().end());
    }
    reads.resize(static_cast<size_t>(item.first_position()));
    numbers.insert(numbers.end(), reads.begin(), reads.end());
  }
  HW_ASSIGN_OR_RETURN(
      numbers, SumOverRanks(std::move(numbers), cache_.backend(), communicator_, cache_.stream()));
  auto next = numbers.begin();
  for (std::vector<int64_t>& reads : result.reads) {
    std::copy_n(next, reads.size(), reads.begin());
    next += static_cast<int64_t>(reads.size());
  }
  return absl::OkStatus();
}

absl::Status CommandRunner::AfterItem(const v1::DecodeCommand::Item& item) {
  const std::vector<int32_t> tokens(item.tokens().begin(), item.tokens().end());
  reports_.AddTokens(item.sequence_id(), item.first_position(), tokens);
  if (!item.plan_due() && !item.snapshot()) return absl::OkStatus();
  return reports_.Report(item.sequence_id(), item.report_sets(), item.snapshot()).status();
}

absl::StatusOr<CommandResult> CommandRunner::SumFigures(const v1::FiguresCommand& command) {
  const int world_size = communicator_.size();
  std::vector<int64_t> numbers;
  for (SequenceId sequence : command.sequence_ids()) {
    HW_ASSIGN_OR_RETURN(const SequenceStats stats, cache_.Stats(sequence));
    const std::vector<int64_t> own =
        FiguresToSum(stats, cache_.options().shape, communicator_.rank(), world_size);
    numbers.insert(numbers.end(), own.begin(), own.end());
  }
  HW_ASSIGN_OR_RETURN(
      numbers, SumOverRanks(std::move(numbers), cache_.backend(), communicator_, cache_.stream()));
  CommandResult result;
  const auto per_sequence = static_cast<size_t>(NumFigures(world_size));
  for (size_t i = 0; i < numbers.size(); i += per_sequence) {
    result.figures.push_back(
        FiguresFromSums(std::span(numbers).subspan(i, per_sequence), world_size));
  }
  return result;
}

absl::StatusOr<CommandResult> CommandRunner::Close(const v1::CloseCommand& command) {
  const SequenceId sequence = command.sequence_id();
  const bool prompt_ended = !prompts_.contains(sequence);
  prompts_.erase(sequence);
  CommandResult result;
  // A sequence that ends within its prompt has no plan to report.
  if (prompt_ended) {
    HW_ASSIGN_OR_RETURN(result.plan, ReportEnd(sequence, command.report_sets()));
  }
  if (options_.recorder != nullptr) options_.recorder->Forget(sequence);
  if (options_.traces != nullptr) options_.traces->Forget(sequence);
  HW_RETURN_IF_ERROR(cache_.Close(sequence));
  const std::function<void()> report_finished = reports_.Close(sequence);
  if (options_.tier != nullptr) {
    options_.tier->WhenWritten(sequence, report_finished);
  } else {
    report_finished();
  }
  return result;
}

absl::StatusOr<int64_t> CommandRunner::ReportEnd(SequenceId sequence, bool with_sets) {
  HW_ASSIGN_OR_RETURN(const int64_t plan, reports_.Report(sequence, with_sets));
  if (options_.recorder != nullptr) Dump(sequence, plan);
  if (options_.traces == nullptr) return plan;
  HW_ASSIGN_OR_RETURN(const SequenceStats stats, cache_.Stats(sequence));
  const absl::Status written = options_.traces->End(sequence, stats.tokens_seen);
  if (!written.ok()) {
    LogError("no trace written", {{"sequence", sequence}, {"error", written.ToString()}});
  }
  return plan;
}

// Whose rows the model computes next.
void CommandRunner::ExpectRows(std::vector<KvRecorder::Rows> rows) {
  if (options_.recorder != nullptr) options_.recorder->Expect(rows);
  if (options_.traces != nullptr) options_.traces->Expect(std::move(rows));
}

void CommandRunner::Dump(SequenceId sequence, int64_t plan) {
  const auto report = cache_.Report(sequence, /*with_sets=*/true);
  absl::Status dumped = report.status();
  if (report.ok()) {
    dumped = options_.recorder->Dump(options_.dump_dir, cache_.options().rank, plan, *report);
  }
  if (!dumped.ok()) {
    LogError("dump failed", {{"sequence", sequence}, {"error", dumped.ToString()}});
  }
}

absl::StatusOr<std::vector<float>> CommandRunner::CopyLogits(DeviceSpan<const float> logits) {
  if (!options_.copy_logits) return std::vector<float>();
  return ReadDevice(logits, cache_.backend(), cache_.stream());
}

}  // namespace heavywater
