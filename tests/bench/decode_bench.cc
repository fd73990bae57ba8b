// `decode`: tokens a second of the built-in runner on one core, beside llama.cpp with the
// same model file, where that is installed.
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "cache_service/base/step_phases.h"
#include "tests/bench/bench_runner.h"
#include "tests/bench/line_process.h"
#include "tests/bench/options.h"
#include "tests/bench/timing.h"

namespace heavywater {
namespace {

constexpr int64_t kContexts[] = {128, 2048, 8192};
constexpr int64_t kQuickContexts[] = {128};
// Whole plan intervals of every policy here: a block holds each kind of step in proportion.
constexpr int kBlockTokens = 16;
constexpr int kBlocks = 7;  // odd: the median counts
constexpr int kQuickBlocks = 1;
constexpr SequenceId kSequence = 1;

struct Decoding {
  std::string engine;
  std::string policy;
  std::optional<double> budget;  // of the prompt
  double prompt_seconds = 0;
  double block_seconds = 0;
  StepPhaseTimes phases = {};  // of all blocks; empty sum: not known
};

// Milliseconds a token: the shares of the wall clock, of the CPU time that counts.
BenchJson PhasesToJson(const Decoding& decoding) {
  double sum = 0;
  for (const int64_t time : decoding.phases) sum += static_cast<double>(time);
  BenchJson json = BenchJson::object();
  for (int i = 0; sum > 0 && i < kNumStepPhases; ++i) {
    const auto phase = static_cast<StepPhase>(i);
    if (phase == StepPhase::kOutside) continue;
    json[std::string(StepPhaseName(phase))] =
        static_cast<double>(decoding.phases[static_cast<size_t>(i)]) / sum *
        decoding.block_seconds / kBlockTokens * 1e3;
  }
  return json;
}

BenchJson ToJson(const Decoding& decoding, int64_t context) {
  BenchJson row = {{"engine", decoding.engine},
                   {"policy", decoding.policy},
                   {"budget", nullptr},
                   {"context", context},
                   {"tokens_per_s", kBlockTokens / decoding.block_seconds},
                   {"prompt_tokens_per_s", static_cast<double>(context) / decoding.prompt_seconds},
                   {"phases", PhasesToJson(decoding)}};
  if (decoding.budget.has_value()) row["budget"] = *decoding.budget;
  return row;
}

// As many tokens of a text, repeated where it is shorter.
std::vector<int32_t> PromptOf(const std::vector<int32_t>& text, int64_t tokens) {
  std::vector<int32_t> prompt;
  while (static_cast<int64_t>(prompt.size()) < tokens) {
    prompt.insert(prompt.end(), text.begin(), text.end());
  }
  prompt.resize(static_cast<size_t>(tokens));
  return prompt;
}

class DecodeBench {
 public:
  static absl::StatusOr<std::unique_ptr<DecodeBench>> Create(const BenchOptions& options) {
    std::unique_ptr<DecodeBench> bench(new DecodeBench);
    bench->blocks_ = options.quick ? kQuickBlocks : kBlocks;
    HW_ASSIGN_OR_RETURN(bench->file_, OpenModel(options.model));
    HW_RETURN_IF_ERROR(CheckExpectedIds(*bench->file_, /*all=*/!options.quick));
    HW_ASSIGN_OR_RETURN(bench->runner_,
                        BenchRunner::Create(*bench->file_, *bench->ranks_[0], KvDtype::kBFloat16));
    HW_ASSIGN_OR_RETURN(bench->texts_, ReadExpectedTexts());
    HW_RETURN_IF_ERROR(bench->StartPeer(options.model));
    return bench;
  }

  absl::StatusOr<std::vector<Decoding>> Measure(int64_t context) {
    const std::vector<int32_t>& longest =
        std::ranges::max_element(texts_, {}, [](const ExpectedText& text) {
          return text.prompt.size();
        })->prompt;
    const std::vector<int32_t> prompt = PromptOf(longest, context);
    std::vector<Decoding> decodings;
    for (const char* preset : {"full", "snapkv_h2o", "recall"}) {
      HW_ASSIGN_OR_RETURN(Decoding decoding, MeasureOwn(preset, prompt));
      decodings.push_back(std::move(decoding));
    }
    if (peer_ == nullptr) return decodings;
    HW_ASSIGN_OR_RETURN(Decoding decoding, MeasurePeer(prompt));
    decodings.push_back(std::move(decoding));
    return decodings;
  }

 private:
  DecodeBench() = default;

  absl::StatusOr<Decoding> MeasureOwn(const char* preset, const std::vector<int32_t>& prompt) {
    HW_ASSIGN_OR_RETURN(PolicyOptions policy, Preset(preset));
    // The budget is that of the preset, however short the prompt; recall has a minimum.
    if (!policy.recall.enabled) policy.min_budget_tokens = 1;
    Decoding decoding{.engine = "heavywater", .policy = preset, .budget = {}};
    double start = CpuSeconds();
    HW_RETURN_IF_ERROR(runner_->Open(kSequence, policy, prompt, blocks_ * kBlockTokens));
    decoding.prompt_seconds = CpuSeconds() - start;
    TakeStepPhaseTimes();
    std::vector<double> seconds;
    for (int block = 0; block < blocks_; ++block) {
      start = CpuSeconds();
      for (int i = 0; i < kBlockTokens; ++i) HW_RETURN_IF_ERROR(runner_->Step());
      seconds.push_back(CpuSeconds() - start);
    }
    decoding.block_seconds = Median(seconds);
    decoding.phases = TakeStepPhaseTimes();
    HW_RETURN_IF_ERROR(runner_->CheckSets(kSequence));
    HW_ASSIGN_OR_RETURN(const SequenceStats stats, runner_->Stats(kSequence));
    if (stats.budget.bounded_decode) {
      decoding.budget = std::min(1.0, static_cast<double>(stats.budget.budget_tokens) /
                                          static_cast<double>(prompt.size()));
    }
    HW_RETURN_IF_ERROR(runner_->Close(kSequence));
    return decoding;
  }

  absl::StatusOr<nlohmann::json> AskPeer(const std::vector<int32_t>& prompt, int blocks) {
    const nlohmann::json request = {
        {"prompt", prompt}, {"blocks", blocks}, {"block_tokens", kBlockTokens}};
    HW_ASSIGN_OR_RETURN(const std::string line, peer_->Ask(request.dump()));
    nlohmann::json answer = nlohmann::json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (answer.is_object()) return answer;
    return absl::InternalError(absl::StrCat("llama.cpp answers ", line, ", want an object"));
  }

  absl::StatusOr<Decoding> MeasurePeer(const std::vector<int32_t>& prompt) {
    HW_ASSIGN_OR_RETURN(const nlohmann::json answer, AskPeer(prompt, blocks_));
    return Decoding{.engine = "llama.cpp",
                    .policy = "full",
                    .budget = {},
                    .prompt_seconds = answer.at("prompt_seconds").get<double>(),
                    .block_seconds = Median(answer.at("block_seconds"))};
  }

  // Leaves none where the package is missing.
  absl::Status StartPeer(const std::string& model) {
    const std::string script = HEAVYWATER_SOURCE_DIR "/tests/bench/llama_cpp_peer.py";
    HW_ASSIGN_OR_RETURN(peer_, LineProcess::Start({"python3", script, model}));
    const auto hello = peer_->Read();
    if (hello.ok() && hello->starts_with("{\"version\"")) return CheckPeer();
    std::fprintf(stderr,
                 "heavywater-bench: no rows of llama.cpp: pip install llama-cpp-python for the "
                 "python3 on PATH (it compiles for some minutes)\n");
    peer_.reset();
    return absl::OkStatus();
  }

  // It quantises what it multiplies, so that its tokens differ from ours before long: what
  // must be alike is the first one after a question.
  absl::Status CheckPeer() {
    const std::vector<int32_t>& prompt = texts_[0].prompt;
    HW_ASSIGN_OR_RETURN(const nlohmann::json answer, AskPeer(prompt, 1));
    PolicyOptions full;
    full.policy = Policy::kFull;
    HW_RETURN_IF_ERROR(runner_->Open(kSequence, full, prompt, 1));
    const int32_t want = runner_->ids(kSequence)[0];
    HW_RETURN_IF_ERROR(runner_->Close(kSequence));
    const int32_t got = answer.at("ids").at(0);
    if (got == want) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("llama.cpp's first token after \"", texts_[0].name,
                                            "\" is ", got, ", ours ", want));
  }

  std::vector<std::unique_ptr<Communicator>> ranks_ = CreateLocalGroup(1, absl::Seconds(600));
  std::unique_ptr<ModelFile> file_;
  std::unique_ptr<BenchRunner> runner_;
  std::vector<ExpectedText> texts_;
  std::unique_ptr<LineProcess> peer_;  // null: not there
  int blocks_ = 0;
};

}  // namespace

absl::StatusOr<BenchJson> RunDecodeBench(const BenchOptions& options) {
  HW_RETURN_IF_ERROR(CheckHasModel(options));
  HW_ASSIGN_OR_RETURN(const auto bench, DecodeBench::Create(options));
  std::vector<int64_t> contexts(std::begin(kContexts), std::end(kContexts));
  if (options.quick) contexts.assign(std::begin(kQuickContexts), std::end(kQuickContexts));
  if (options.context > 0) contexts = {options.context};
  BenchJson rows = BenchJson::array();
  for (const int64_t context : contexts) {
    HW_ASSIGN_OR_RETURN(const std::vector<Decoding> decodings, bench->Measure(context));
    for (const Decoding& decoding : decodings) rows.push_back(ToJson(decoding, context));
  }
  return BenchJson{{"rows", std::move(rows)}};
}

}  // namespace heavywater
