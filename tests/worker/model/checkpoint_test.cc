// Architectures, RoPE scalings and both formats against what Transformers computes.
#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "gtest/gtest.h"
#include "tests/worker/model/full_cache_decoder.h"
#include "tests/worker/model/gguf_writer.h"
#include "tests/worker/model/llama_group.h"
#include "tests/worker/model/tiny_checkpoint.h"
#include "worker/model/model_file.h"

namespace heavywater {
namespace {

// What one rank of a group computes.
struct Computed {
  std::vector<float> logits;  // [tokens][vocab], of the prompt
  std::vector<int32_t> greedy;
};

int32_t Best(std::span<const float> logits) {
  return static_cast<int32_t>(std::ranges::max_element(logits) - logits.begin());
}

absl::StatusOr<Computed> Compute(LlamaGroup& group, int rank, const std::vector<int32_t>& tokens,
                                 size_t new_tokens) {
  FullCacheDecoder decoder(group.runner(rank), group.shape(rank), group.backend(rank));
  Computed computed;
  HW_ASSIGN_OR_RETURN(computed.logits, decoder.Feed(tokens, false));
  const auto vocab = static_cast<size_t>(group.runner(rank).vocab_size());
  std::vector<float> last(computed.logits.end() - static_cast<ptrdiff_t>(vocab),
                          computed.logits.end());
  while (computed.greedy.size() < new_tokens) {
    computed.greedy.push_back(Best(last));
    HW_ASSIGN_OR_RETURN(last, decoder.Feed(std::span(&computed.greedy.back(), 1), true));
  }
  return computed;
}

void ExpectLogits(const std::vector<float>& got, const std::vector<std::vector<float>>& want) {
  const size_t vocab = want[0].size();
  ASSERT_GE(got.size(), want.size() * vocab);
  const size_t first = got.size() - want.size() * vocab;
  float error = 0;
  for (size_t i = 0; i < want.size() * vocab; ++i) {
    error = std::max(error, std::fabs(got[first + i] - want[i / vocab][i % vocab]));
  }
  EXPECT_LT(error, 1e-3);
}

void ExpectAsRecorded(const ModelFile& file, const TinyCheckpoint& checkpoint, int ranks) {
  auto group = LlamaGroup::Create(file, ranks, {});
  ASSERT_TRUE(group.ok()) << group.status();
  std::vector<Computed> computed(static_cast<size_t>(ranks));
  const absl::Status status = (*group)->Run([&](int rank) {
    HW_ASSIGN_OR_RETURN(computed[static_cast<size_t>(rank)],
                        Compute(**group, rank, checkpoint.tokens(), checkpoint.greedy().size()));
    return absl::OkStatus();
  });
  ASSERT_TRUE(status.ok()) << status;
  for (const Computed& of_rank : computed) {
    ExpectLogits(of_rank.logits, checkpoint.logits());
    EXPECT_EQ(of_rank.greedy, checkpoint.greedy());
  }
}

TEST(CheckpointTest, AFolderOfSafetensorsGivesTheLogitsAndTokensOfTransformers) {
  const auto checkpoints = RecordedCheckpoints();
  ASSERT_EQ(checkpoints.size(), 8u);
  for (const TinyCheckpoint& checkpoint : checkpoints) {
    SCOPED_TRACE(checkpoint.name());
    const TemporaryFolder folder;
    checkpoint.WriteFolder(folder);
    const auto file = OpenModel(folder.path());
    ASSERT_TRUE(file.ok()) << file.status();
    for (const int ranks : {1, 2, 6}) ExpectAsRecorded(**file, checkpoint, ranks);
  }
}

TEST(CheckpointTest, AGgufFileGivesTheLogitsAndTokensOfTransformers) {
  for (const TinyCheckpoint& checkpoint : RecordedCheckpoints()) {
    SCOPED_TRACE(checkpoint.name());
    const TemporaryFile written(checkpoint.GgufBytes());
    const auto file = OpenModel(written.path());
    ASSERT_TRUE(file.ok()) << file.status();
    ExpectAsRecorded(**file, checkpoint, 1);
  }
}

TEST(CheckpointTest, TheFingerprintOfAFolderDiffersWhenAWeightDoes) {
  const TinyCheckpoint checkpoint = RecordedCheckpoints().front();
  std::vector<NamedTensor> tensors = checkpoint.tensors();
  const auto fingerprint = [&] {
    const TemporaryFolder folder;
    checkpoint.WriteFolder(folder);
    folder.Write("model.safetensors", SafetensorsFile(tensors, "F32"));
    return (*OpenModel(folder.path()))->Fingerprint();
  };
  const std::string whole = fingerprint();
  EXPECT_EQ(whole.substr(0, 12), "safetensors-");
  EXPECT_EQ(whole, fingerprint());
  tensors.back().values.back() += 1;
  EXPECT_NE(whole, fingerprint());
}

}  // namespace
}  // namespace heavywater
