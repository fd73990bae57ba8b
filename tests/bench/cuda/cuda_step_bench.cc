// `step --backend cuda`: a whole decode step of one rank, model and plan included,
// beside the time in which the device could read what it must read.
#include <chrono>
#include <cmath>
#include <memory>
#include <numeric>
#include <span>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "tests/bench/cuda/device.h"
#include "tests/bench/cuda/llama_file.h"
#include "tests/bench/options.h"
#include "tests/worker/model/gguf_writer.h"
#include "worker/cache/device_bytes.h"
#include "worker/comm/communicator.h"
#include "worker/comm/staged/staged_communicator.h"
#include "worker/model/cuda/cuda_llama_runner.h"
#include "worker/rank/decode_step.h"
#include "worker/rank/prompt_pass.h"
#include "worker/rank/rank_cache.h"
#include "worker/sizing/cuda_scratch.h"
#include "worker/sizing/memory_plan.h"

namespace heavywater {
namespace {

using Clock = std::chrono::steady_clock;

constexpr LlamaFileShape kShape;
constexpr LlamaFileShape kQuickShape = {
    .hidden = 512, .query_heads = 8, .kv_heads = 2, .head_dim = 64, .ffn = 1024, .vocab = 512};
constexpr int64_t kContexts[] = {8192, 32768};
constexpr int64_t kQuickContexts[] = {512};
constexpr const char* kPolicies[] = {"full", "snapkv_h2o"};
constexpr int kWarmSteps = 4;
constexpr int kTimedSteps = 32;
constexpr int kMaxStepTokens = 512;

double Seconds(Clock::duration duration) { return std::chrono::duration<double>(duration).count(); }

// One rank alone, with a model.
class BenchRank {
 public:
  static absl::StatusOr<std::unique_ptr<BenchRank>> Create(const LlamaFileShape& shape,
                                                           Backend& backend) {
    auto rank = std::make_unique<BenchRank>(backend);
    const TemporaryFile path(RandomLlamaFile(shape));
    HW_ASSIGN_OR_RETURN(const auto file, GgufFile::Open(path.path()));
    HW_ASSIGN_OR_RETURN(auto matmul, CreateCublasMatmul());
    HW_ASSIGN_OR_RETURN(rank->runner_,
                        CudaLlamaRunner::Create(*file, rank->comm_, backend, std::move(matmul),
                                                {.max_batch_tokens = kMaxStepTokens}));
    const CudaLlamaRunner& runner = *rank->runner_;
    HW_ASSIGN_OR_RETURN(
        rank->cache_, RankCache::Create({.shape = MakeKvShape(runner.config(), runner.shard(), {}),
                                         .hidden_size = runner.hidden_size(),
                                         .vocab_size = runner.vocab_size(),
                                         .max_step_tokens = kMaxStepTokens},
                                        backend, nullptr));
    return rank;
  }
  explicit BenchRank(Backend& backend)
      : backend_(backend),
        comm_(std::move(CreateLocalGroup(1, absl::Seconds(30)).front()), backend) {}

  const ModelConfig& config() const { return runner_->config(); }

  absl::Status Open(SequenceOptions sequence, double& prompt_s) {
    HW_RETURN_IF_ERROR(cache_->Open(1, sequence));
    std::vector<int32_t> tokens(sequence.prompt_tokens);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = TokenAt(static_cast<int64_t>(i));
    const auto start = Clock::now();
    HW_ASSIGN_OR_RETURN(const auto pass, PromptPass::Create(*cache_, *runner_, 1, tokens));
    HW_RETURN_IF_ERROR(pass->Run(comm_).status());
    HW_RETURN_IF_ERROR(backend_.Synchronize(cache_->stream()));
    prompt_s = Seconds(Clock::now() - start);
    return absl::OkStatus();
  }
  absl::Status Close() { return cache_->Close(1); }

  absl::Status Step(DecodeStep& step, uint64_t number) {
    HW_ASSIGN_OR_RETURN(const SequenceStats stats, cache_->Stats(1));
    StepDescriptor descriptor;
    descriptor.step = number;
    descriptor.items = {{.sequence = 1,
                         .first_position = static_cast<Position>(stats.tokens_seen),
                         .num_tokens = 1,
                         .plan_due = cache_->PlanDue(1, 1)}};
    descriptor.tokens = {TokenAt(stats.tokens_seen)};
    HW_RETURN_IF_ERROR(step.Run(descriptor, comm_));
    HW_RETURN_IF_ERROR(step.item_status()[0]);
    return backend_.Synchronize(cache_->stream());
  }

  // INTERNAL unless the last step's logits are numbers.
  absl::Status CheckLogits(const DecodeStep& step) {
    const DeviceSpan<const float> logits = step.logits(0);
    std::vector<float> values(logits.size());
    HW_RETURN_IF_ERROR(backend_.CopyToHost(std::as_writable_bytes(std::span(values)),
                                           DeviceBytes(logits), cache_->stream()));
    HW_RETURN_IF_ERROR(backend_.Synchronize(cache_->stream()));
    const double sum = std::accumulate(values.begin(), values.end(), 0.0,
                                       [](double s, float v) { return s + std::abs(v); });
    if (std::isfinite(sum) && sum > 0) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("the logits' magnitudes sum to ", sum));
  }

  RankCache& cache() { return *cache_; }
  Model& model() { return *runner_; }

 private:
  int32_t TokenAt(int64_t position) const {
    return static_cast<int32_t>((position * 37 + position / 7 * 11) % config().vocab_size);
  }

  Backend& backend_;
  StagedCommunicator comm_;
  std::unique_ptr<CudaLlamaRunner> runner_;
  std::unique_ptr<RankCache> cache_;
};

absl::StatusOr<BenchJson> MeasureRow(BenchRank& rank, const char* policy, int64_t context,
                                     double bandwidth) {
  Deployment deployment;
  deployment.model = rank.config();
  HW_ASSIGN_OR_RETURN(deployment.policy, Preset(policy));
  deployment.new_tokens = kWarmSteps + kTimedSteps;
  deployment.context_tokens = context + deployment.new_tokens;
  deployment.max_step_tokens = kMaxStepTokens;
  HW_ASSIGN_OR_RETURN(const MemoryPlan plan, PlanMemory(deployment, CudaScratch()));
  double prompt_s = 0;
  HW_RETURN_IF_ERROR(rank.Open({.policy = deployment.policy,
                                .prompt_tokens = context,
                                .max_tokens = deployment.context_tokens},
                               prompt_s));
  DecodeStep step(rank.cache(), rank.model());
  for (int i = 0; i < kWarmSteps; ++i) HW_RETURN_IF_ERROR(rank.Step(step, i));
  const auto start = Clock::now();
  for (int i = 0; i < kTimedSteps; ++i) HW_RETURN_IF_ERROR(rank.Step(step, kWarmSteps + i));
  const double step_s = Seconds(Clock::now() - start) / kTimedSteps;
  HW_RETURN_IF_ERROR(rank.CheckLogits(step));
  HW_RETURN_IF_ERROR(rank.Close());
  const double floor_s = static_cast<double>(plan.step.device()) / bandwidth;
  return BenchJson{{"context", context},
                   {"target", "cuda"},
                   {"policy", policy},
                   {"step_us", step_s * 1e6},
                   {"floor_us", floor_s * 1e6},
                   {"bandwidth_ratio", floor_s / step_s},
                   {"prompt_tokens_per_s", static_cast<double>(context) / prompt_s}};
}

}  // namespace

absl::StatusOr<BenchJson> RunCudaStepBench(const BenchOptions& options) {
  HW_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> device, BenchDevice::Create());
  HW_ASSIGN_OR_RETURN(const double bandwidth, device->MeasureRead());
  HW_ASSIGN_OR_RETURN(const auto rank,
                      BenchRank::Create(options.quick ? kQuickShape : kShape, device->backend()));
  std::span<const int64_t> contexts = kContexts;
  if (options.quick) contexts = kQuickContexts;
  BenchJson rows = BenchJson::array();
  for (const int64_t context : contexts) {
    for (const char* policy : kPolicies) {
      HW_ASSIGN_OR_RETURN(BenchJson row, MeasureRow(*rank, policy, context, bandwidth));
      rows.push_back(std::move(row));
    }
  }
  return BenchJson{{"device", device->name()},
                   {"bandwidth_gb_s", bandwidth / 1e9},
                   {"layers", rank->config().num_layers},
                   {"rows", std::move(rows)}};
}

}  // namespace heavywater
