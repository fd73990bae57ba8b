#include "worker/server/rank_zero.h"

namespace heavywater {

RankZero::RankZero(const v1::WorkerConfig& config, const ModelFacts& facts, OnHostFull on_host_full,
                   Worker& worker, WorkerMetrics& metrics)
    : queue_(static_cast<size_t>(config.max_queued())),
      memory_(worker.runner().cache()),
      sequences_(worker.link()),
      engine_({.tokenizer = *facts.tokenizer,
               .context_tokens = facts.config.context_length,
               .vocab_size = facts.config.vocab_size,
               .shape = worker.runner().cache().options().shape,
               .on_host_full = on_host_full,
               .default_policy = config.default_policy(),
               .prefix_reuse = config.prefix_reuse(),
               .no_prefix_reuse = worker.no_prefix_reuse()},
              memory_, sequences_, queue_),
      scheduler_(worker.runner(), queue_, *facts.tokenizer, metrics,
                 {.max_batch = config.max_batch(),
                  .report_interval_plans = config.report_interval_plans(),
                  .snapshot_interval_tokens = config.snapshot_interval_tokens(),
                  .max_stall = absl::Milliseconds(config.max_stall_ms()),
                  .comm_timeout = absl::Milliseconds(config.comm_timeout_ms()),
                  .client_stall = absl::Milliseconds(config.client_stall_ms())}),
      link_(worker.link()) {
  if (link_ == nullptr) return;
  link_->SetSuspendListener([this](SequenceId sequence) { engine_.Suspend(sequence); });
}

RankZero::~RankZero() {
  if (link_ != nullptr) link_->SetSuspendListener(nullptr);
}

}  // namespace heavywater
