// A Llama of random weights on a GPU, whole: its ranks share the device, reduce
// through the host, and keep what one rank keeps. Needs a GPU.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "gtest/gtest.h"
#include "tests/worker/model/tiny_llama.h"
#include "tests/worker/rank/cuda/llama_rank.h"
#include "worker/backend/cuda/cuda_backend.h"
#include "worker/comm/communicator.h"
#include "worker/rank/decode_step.h"

namespace heavywater {
namespace {

#ifdef HEAVYWATER_CUDA_SHIM
constexpr int kPromptTokens = 160;
constexpr int kSteps = 4;
#else
constexpr int kPromptTokens = 600;
constexpr int kSteps = 16;
#endif
constexpr int kHeavyTokens = kPromptTokens / 6;
constexpr int kRecentTokens = kPromptTokens / 15;
constexpr TinyLlamaShape kShape = {.layers = 3,
                                   .hidden = 256,
                                   .query_heads = 16,
                                   .kv_heads = 4,
                                   .head_dim = 64,
                                   .ffn = 512,
                                   .vocab = 1000};

std::vector<int32_t> Tokens(int count) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < count; ++i) tokens.push_back((i * 37 + i / 7 * 11) % kShape.vocab);
  return tokens;
}

SequenceOptions Sequence() {
  SequenceOptions sequence;
  sequence.policy.policy = Policy::kSnapKvH2o;
  sequence.policy.heavy_tokens = kHeavyTokens;
  sequence.policy.recent_tokens = kRecentTokens;
  sequence.prompt_tokens = kPromptTokens;
  sequence.max_tokens = kPromptTokens + kSteps;
  return sequence;
}

// What a rank leaves.
struct Outcome {
  std::vector<ResidentSet> at_prompts_end;
  std::vector<ResidentSet> at_the_end;
  std::vector<float> logits;  // of the last step
};

absl::StatusOr<Outcome> Run(LlamaRank& rank) {
  Outcome outcome;
  const std::vector<int32_t> tokens = Tokens(kPromptTokens + kSteps);
  HW_RETURN_IF_ERROR(
      rank.OpenAndRunPrompt(1, Sequence(), {tokens.begin(), tokens.begin() + kPromptTokens}));
  HW_ASSIGN_OR_RETURN(PlanReport report, rank.cache().Report(1, /*with_sets=*/true));
  outcome.at_prompts_end = std::move(report.sets);
  DecodeStep step(rank.cache(), rank.runner());
  for (int i = 0; i < kSteps; ++i) {
    HW_RETURN_IF_ERROR(step.Run(rank.NextStep(1, tokens[kPromptTokens + i]), rank.communicator()));
    HW_RETURN_IF_ERROR(step.item_status()[0]);
  }
  HW_ASSIGN_OR_RETURN(report, rank.cache().Report(1, /*with_sets=*/true));
  outcome.at_the_end = std::move(report.sets);
  HW_ASSIGN_OR_RETURN(outcome.logits, rank.Logits(step));
  return outcome;
}

// Each rank on its own thread; rank 0's outcome.
absl::StatusOr<Outcome> RunRanks(const GgufFile& file, int size) {
  auto hosts = CreateLocalGroup(size, absl::Seconds(20));
  std::vector<absl::StatusOr<Outcome>> outcomes(size, absl::UnknownError("not run"));
  std::vector<std::unique_ptr<LlamaRank>> ranks(size);  // none leaves before all are done
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      auto created = LlamaRank::Create(file, std::move(hosts[rank]));
      if (!created.ok()) {
        outcomes[rank] = created.status();
        return;
      }
      ranks[rank] = *std::move(created);
      outcomes[rank] = Run(*ranks[rank]);
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::string errors;
  for (int rank = 0; rank < size; ++rank) {
    if (outcomes[rank].ok()) continue;
    errors += absl::StrCat("rank ", rank, ": ", outcomes[rank].status().ToString(), "; ");
  }
  if (!errors.empty()) return absl::UnknownError(errors);
  return outcomes[0];
}

// Positions of `want` that `got` lacks, over all layers; -1 when sets are not alike.
int64_t Missing(const std::vector<ResidentSet>& got, const std::vector<ResidentSet>& want) {
  if (got.size() != want.size()) return -1;
  int64_t missing = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const std::set<Position> have(got[i].positions.begin(), got[i].positions.end());
    if (have.size() != want[i].positions.size()) return -1;
    for (const Position position : want[i].positions) missing += have.contains(position) ? 0 : 1;
  }
  return missing;
}

double LargestError(const std::vector<float>& got, const std::vector<float>& want) {
  double scale = 0;
  double error = got.size() == want.size() ? 0 : INFINITY;
  for (size_t i = 0; i < std::min(got.size(), want.size()); ++i) {
    scale = std::max<double>(scale, std::abs(want[i]));
    // NaN must not pass as no difference.
    error = got[i] == got[i] ? std::max<double>(error, std::abs(got[i] - want[i])) : INFINITY;
  }
  return error / scale;
}

TEST(DeviceLlamaTest, RanksThatShareAGpuKeepWhatOneRankKeeps) {
  if (const auto backend = CreateCudaBackend({}); !backend.ok()) GTEST_SKIP() << backend.status();
  const TinyLlama llama(kShape, 1);
  const TemporaryFile path(llama.File());
  const std::unique_ptr<GgufFile> file = GgufFile::Open(path.path()).value();
  const auto alone = RunRanks(*file, 1);
  ASSERT_TRUE(alone.ok()) << alone.status();
  const int64_t slots = kShape.layers * (kHeavyTokens + kRecentTokens);
  for (const int size : {2, 4}) {
    const auto outcome = RunRanks(*file, size);
    ASSERT_TRUE(outcome.ok()) << size << " ranks: " << outcome.status();
    const int64_t at_first = Missing(outcome->at_prompts_end, alone->at_prompts_end);
    const int64_t at_last = Missing(outcome->at_the_end, alone->at_the_end);
    std::printf("%d ranks: %ld of %ld slots differ at the prompt's end, %ld after %d steps\n", size,
                static_cast<long>(at_first), static_cast<long>(slots), static_cast<long>(at_last),
                kSteps);
    // Sums in another order: near the cut a position may differ, and with it a little
    // of what follows.
    EXPECT_GE(at_first, 0);
    EXPECT_LE(at_first * 200, slots);
    EXPECT_GE(at_last, 0);
    EXPECT_LE(at_last * 50, slots);
    EXPECT_LT(LargestError(outcome->logits, alone->logits), 0.01);
  }
}

}  // namespace
}  // namespace heavywater
