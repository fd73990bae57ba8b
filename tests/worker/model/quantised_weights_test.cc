// Every tensor type through the runner: the logits of a quantised file are those of the
// same file in float32, however ranks cut blocks apart.
#include <algorithm>
#include <cmath>
#include <map>

#include "cache_service/base/status.h"
#include "gtest/gtest.h"
#include "tests/worker/model/full_cache_decoder.h"
#include "tests/worker/model/gguf_writer.h"
#include "tests/worker/model/llama_group.h"
#include "worker/model/dequantize.h"
#include "worker/model/sampler.h"

namespace heavywater {
namespace {

constexpr int kHidden = 256;  // a block of the k-quants
constexpr int kHeads = 4;
constexpr int kKvHeads = 2;
constexpr int kHeadDim = 64;
constexpr int kFfn = 512;
constexpr int kVocab = 70;

struct Type {
  TensorType type;
  std::vector<size_t> halves;  // offsets of a block's scales, so that they are small numbers
  uint16_t half = 0;
};

// The blocks of `rows` rows of `cols`, random but for their scales.
std::string RandomBlocks(const Type& type, int rows, int cols, uint64_t seed) {
  const TensorBlock block = *TensorBlockOf(type.type);
  const auto count = static_cast<size_t>(rows * (cols / block.elements) * block.bytes);
  std::string bytes(count, '\0');
  uint64_t drawn = 0;
  for (char& byte : bytes) byte = static_cast<char>(UniformAt(seed, drawn++) * 256);
  if (type.type == TensorType::kF16 || type.type == TensorType::kBF16) {
    // Any sign and fraction, exponents below 1.
    const int top = type.type == TensorType::kF16 ? 0x2c : 0x3d;
    for (size_t i = 1; i < count; i += 2) {
      bytes[i] = static_cast<char>((bytes[i] & 0x81) | top);
    }
  }
  for (size_t at = 0; at < count; at += static_cast<size_t>(block.bytes)) {
    for (const size_t half : type.halves) {
      bytes[at + half] = static_cast<char>(type.half & 0xff);
      bytes[at + half + 1] = static_cast<char>(type.half >> 8);
    }
  }
  return bytes;
}

const std::map<std::string, std::pair<int, int>>& Matrices() {
  static const auto* const matrices = new std::map<std::string, std::pair<int, int>>{
      {"token_embd", {kVocab, kHidden}},
      {"output", {kVocab, kHidden}},
      {"blk.0.attn_q", {kHeads * kHeadDim, kHidden}},
      {"blk.0.attn_k", {kKvHeads * kHeadDim, kHidden}},
      {"blk.0.attn_v", {kKvHeads * kHeadDim, kHidden}},
      {"blk.0.attn_output", {kHidden, kHeads * kHeadDim}},
      {"blk.0.ffn_gate", {kFfn, kHidden}},
      {"blk.0.ffn_up", {kFfn, kHidden}},
      {"blk.0.ffn_down", {kHidden, kFfn}}};
  return *matrices;
}

GgufWriter WithoutMatrices() {
  GgufWriter writer;
  writer.Field("general.architecture", "llama")
      .Field("llama.block_count", uint32_t{1})
      .Field("llama.context_length", uint32_t{64})
      .Field("llama.embedding_length", uint32_t{kHidden})
      .Field("llama.feed_forward_length", uint32_t{kFfn})
      .Field("llama.attention.head_count", uint32_t{kHeads})
      .Field("llama.attention.head_count_kv", uint32_t{kKvHeads})
      .Field("llama.attention.layer_norm_rms_epsilon", 1e-5f);
  const std::vector<float> ones(kHidden, 1.0f);
  for (const char* name : {"output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"}) {
    writer.Tensor(std::string(name) + ".weight", 0, kHidden, ones);
  }
  return writer;
}

std::string Quantised(const Type& type) {
  GgufWriter writer = WithoutMatrices();
  uint64_t seed = 1;
  for (const auto& [name, size] : Matrices()) {
    const auto [rows, cols] = size;
    writer.RawTensor(name + ".weight", type.type,
                     {static_cast<uint64_t>(cols), static_cast<uint64_t>(rows)},
                     RandomBlocks(type, rows, cols, seed++));
  }
  return writer.Finish();
}

std::string InFloat32(const GgufFile& file) {
  GgufWriter writer = WithoutMatrices();
  for (const auto& [name, size] : Matrices()) {
    const GgufTensor tensor = *file.GetTensor(name + ".weight");
    std::vector<float> values(static_cast<size_t>(tensor.rows * tensor.row_elements));
    DequantizeRows(tensor, 0, tensor.rows, values);
    writer.Tensor(name + ".weight", size.first, size.second, values);
  }
  return writer.Finish();
}

// Of the first rank; a prompt, then a token.
std::vector<float> Logits(const GgufFile& file, int ranks) {
  auto group = LlamaGroup::Create(file, ranks, {});
  EXPECT_TRUE(group.ok()) << group.status();
  if (!group.ok()) return {};
  std::vector<float> logits;
  const absl::Status status = (*group)->Run([&](int rank) {
    FullCacheDecoder decoder((*group)->runner(rank), (*group)->shape(rank),
                             (*group)->backend(rank));
    std::vector<int32_t> tokens;
    for (int i = 0; i < 20; ++i) tokens.push_back((i * 37 + 11) % kVocab);
    HW_ASSIGN_OR_RETURN(std::vector<float> mine, decoder.Feed(tokens, false));
    HW_ASSIGN_OR_RETURN(const auto last, decoder.Feed(std::span(tokens).first(1), true));
    mine.insert(mine.end(), last.begin(), last.end());
    if (rank == 0) logits = std::move(mine);
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return logits;
}

class QuantisedWeightsTest : public testing::TestWithParam<Type> {};

TEST_P(QuantisedWeightsTest, GiveTheLogitsOfTheirValuesInFloat32ForAnyNumberOfRanks) {
  const auto quantised = OpenGguf(Quantised(GetParam()));
  ASSERT_TRUE(quantised.ok()) << quantised.status();
  const auto plain = OpenGguf(InFloat32(**quantised));
  ASSERT_TRUE(plain.ok()) << plain.status();
  const std::vector<float> want = Logits(**plain, 1);
  ASSERT_FALSE(want.empty());
  float scale = 0;
  for (const float value : want) scale = std::max(scale, std::fabs(value));
  EXPECT_GT(scale, 0.01f);
  for (const int ranks : {1, 2, 4}) {  // four cut blocks of 256 and share KV heads
    const std::vector<float> got = Logits(**quantised, ranks);
    ASSERT_EQ(got.size(), want.size());
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got[i], want[i], 2e-5 * scale) << "logit " << i << " with " << ranks << " ranks";
    }
  }
}

// Halves: 0x2000 is 2^-7, 0x1800 2^-9, 0x0c00 2^-12.
INSTANTIATE_TEST_SUITE_P(
    All, QuantisedWeightsTest,
    testing::Values(Type{TensorType::kF16, {}, 0}, Type{TensorType::kBF16, {}, 0},
                    Type{TensorType::kQ8_0, {0}, 0x1000}, Type{TensorType::kQ4_0, {0}, 0x2000},
                    Type{TensorType::kQ4_1, {0, 2}, 0x1800}, Type{TensorType::kQ5_0, {0}, 0x1800},
                    Type{TensorType::kQ5_1, {0, 2}, 0x1800},
                    Type{TensorType::kQ4_K, {0, 2}, 0x0800},
                    Type{TensorType::kQ5_K, {0, 2}, 0x0800},
                    Type{TensorType::kQ6_K, {208}, 0x0400}),
    [](const auto& info) { return TensorTypeName(info.param.type); });

}  // namespace
}  // namespace heavywater
