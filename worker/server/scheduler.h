// Continuous batching on rank 0: decides what the group does next. Sequences
// join and leave between steps; prompts run one chunk at a time between them, short ones
// side by side in one.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "heavywater/v1/step.pb.h"
#include "worker/model/tokenizer.h"
#include "worker/server/admission_queue.h"
#include "worker/server/command_runner.h"
#include "worker/server/sequence_run.h"
#include "worker/server/worker_metrics.h"

namespace heavywater {

struct SchedulerOptions {
  int max_batch = 64;
  int report_interval_plans = 16;
  int64_t snapshot_interval_tokens = 64;              // 0: none
  int figures_interval_steps = 8;                     // between sums over ranks for live figures
  int64_t append_step_tokens = 64;                    // of all suffixes in one decode step
  int64_t lone_prompt_tokens = 16;                    // prompts of no more share no chunk
  absl::Duration max_stall = absl::Milliseconds(50);  // of decode, by prompts
  absl::Duration comm_timeout = absl::Seconds(30);
  absl::Duration client_stall = absl::Seconds(60);  // of a client that leaves its queue full
};

class Scheduler {
 public:
  // All outlive this.
  Scheduler(CommandRunner& runner, AdmissionQueue& queue, const Tokenizer& tokenizer,
            WorkerMetrics& metrics, SchedulerOptions options);

  // The thread of the step: works until Stop(), then ends what still runs and
  // tells the other ranks. An error: the group has failed; every request ends
  // with UNAVAILABLE.
  absl::Status Run();
  // One round: some prompt chunks and at most one decode step. Tests drive it.
  absl::Status RunOnce();

  // Any thread.
  void Stop();
  int64_t num_running() const { return num_running_; }

 private:
  using Runs = std::vector<std::unique_ptr<SequenceRun>>;

  absl::StatusOr<CommandResult> Execute(const v1::GroupCommand& command);
  // Whose clients have gone, or read nothing any more.
  absl::Status CloseCancelled();
  bool ClientStalls(const SequenceRun& run) const;
  absl::Status Admit();
  bool FitsNow(const ServedGeneration& generation) const;
  absl::Status Open(const std::shared_ptr<ServedGeneration>& generation);
  absl::Status StartRestored(SequenceRun& run);
  bool SnapshotDue(const SequenceRun& run, const v1::DecodeCommand::Item& item,
                   const SequenceStats& stats) const;
  absl::StatusOr<bool> Work();
  absl::StatusOr<bool> RunPrompts();
  absl::Status RunPromptChunk(const std::vector<SequenceRun*>& batch);
  std::vector<SequenceRun*> NextPrompts();
  uint64_t BeginPromptBatch();
  int64_t ChunkTokens(const SequenceRun& run) const;
  absl::Status StartDecode(SequenceRun& run, std::span<const float> logits);
  absl::StatusOr<bool> RunDecode();
  std::vector<SequenceRun*> FillDecode(v1::DecodeCommand& decode) const;
  v1::DecodeCommand::Item MakeItem(const SequenceRun& run, int64_t token_limit) const;
  absl::Status AfterDecode(const std::vector<SequenceRun*>& runs, const v1::DecodeCommand& decode,
                           const CommandResult& result, absl::Duration took);
  absl::Status RefreshFigures(const std::vector<SequenceRun*>& runs);
  // Frees the sequence on all ranks and then tells the client how it ended:
  // with the summary, or with an error. `run` is gone afterwards.
  absl::Status Complete(SequenceRun& run);
  absl::Status End(SequenceRun& run, const absl::Status& status);
  absl::StatusOr<CommandResult> Close(const SequenceRun& run);
  void Finish(SequenceRun& run, const absl::Status& status);
  absl::Status Idle();
  void FailAll(const absl::Status& status);

  CommandRunner& runner_;
  AdmissionQueue& queue_;
  const Tokenizer& tokenizer_;
  WorkerMetrics& metrics_;
  const SchedulerOptions options_;
  Runs runs_;  // admitted, in order of admission
  uint64_t num_prompt_batches_ = 0;
  uint64_t last_prompt_batch_ = 0;
  uint64_t step_ = 0;
  absl::Time last_command_;
  std::atomic<bool> stopping_ = false;
  std::atomic<int64_t> num_running_ = 0;
};

}  // namespace heavywater
