// What every rank does on a command of rank 0: the one place where the group
// acts together.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "heavywater/v1/step.pb.h"
#include "worker/comm/communicator.h"
#include "worker/rank/decode_step.h"
#include "worker/rank/prompt_pass.h"
#include "worker/rank/rank_cache.h"
#include "worker/server/kv_recorder.h"
#include "worker/server/plan_reports.h"
#include "worker/server/remote_host_tier.h"
#include "worker/server/sequence_figures.h"
#include "worker/server/snapshot_source.h"
#include "worker/server/trace_recorder.h"

namespace heavywater {

struct CommandResult {
  absl::Status status;                      // of open: the sequence cannot go on;
                                            // of decode: none of the items has advanced
  std::vector<absl::Status> item_status;    // decode, by item; prompt, by sequence: it cannot
                                            // go on
  std::vector<std::vector<float>> logits;   // likewise: empty where it failed, and where a
                                            // prompt is not complete
  std::vector<std::vector<int64_t>> reads;  // decode, by item that asks: how often each position
                                            // was read in place, summed over the ranks
  std::vector<SequenceFigures> figures;     // figures, by sequence
  int64_t plan = 0;                         // close: the last plan reported
};

struct CommandRunnerOptions {
  bool copy_logits = false;        // rank 0
  KvRecorder* recorder = nullptr;  // null: no dump
  std::string dump_dir;
  TraceRecorder* traces = nullptr;            // null: none
  RemoteHostTier* tier = nullptr;             // of the cache, told how long sequences may get
  const SnapshotSource* snapshots = nullptr;  // of restored sequences; null: none
  bool take_snapshots = false;                // at the prompt's end
};

// Used by the thread of the step.
class CommandRunner {
 public:
  // All outlive this.
  CommandRunner(RankCache& cache, Model& model, Communicator& communicator, PlanReports& reports,
                CommandRunnerOptions options);
  ~CommandRunner();

  // The result is the same on every rank, logits aside. An error: the group
  // cannot go on.
  absl::StatusOr<CommandResult> Run(const v1::GroupCommand& command);

  RankCache& cache() { return cache_; }
  Communicator& communicator() { return communicator_; }

 private:
  absl::StatusOr<CommandResult> Open(const v1::OpenCommand& command);
  absl::Status OpenHere(const v1::OpenCommand& command);
  absl::Status OpenCache(const v1::OpenCommand& command);
  absl::StatusOr<CommandResult> Restore(const v1::RestoreCommand& command);
  absl::Status RestoreHere(const v1::RestoreCommand& command);
  absl::StatusOr<CommandResult> RunPrompt(const v1::PromptLayerCommand& command);
  absl::StatusOr<PromptPass*> FindPrompt(SequenceId sequence, int layer) const;
  absl::StatusOr<std::vector<PromptPass*>> FindPrompts(const v1::PromptLayerCommand& command);
  absl::Status CompleteLayer(std::span<PromptPass* const> passes, CommandResult& result);
  absl::StatusOr<std::vector<float>> EndPrompt(PromptPass& pass);
  absl::StatusOr<CommandResult> Decode(const v1::DecodeCommand& command);
  absl::Status SumReads(const v1::DecodeCommand& command, CommandResult& result);
  absl::Status AfterItem(const v1::DecodeCommand::Item& item);
  absl::StatusOr<CommandResult> SumFigures(const v1::FiguresCommand& command);
  absl::StatusOr<CommandResult> Close(const v1::CloseCommand& command);
  void ExpectRows(std::vector<KvRecorder::Rows> rows);
  absl::StatusOr<int64_t> ReportEnd(SequenceId sequence, bool with_sets);
  void Dump(SequenceId sequence, int64_t plan);
  absl::StatusOr<std::vector<float>> CopyLogits(DeviceSpan<const float> logits);

  RankCache& cache_;
  Model& model_;
  Communicator& communicator_;
  PlanReports& reports_;
  const CommandRunnerOptions options_;
  DecodeStep step_;
  std::map<SequenceId, std::unique_ptr<PromptPass>> prompts_;  // that still run
};

}  // namespace heavywater
