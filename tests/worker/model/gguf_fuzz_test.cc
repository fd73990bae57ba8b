// Damaged files: an error or a value, never a read beyond the file.
#include <algorithm>

#include "gtest/gtest.h"
#include "tests/worker/model/gguf_writer.h"
#include "tests/worker/model/tiny_llama.h"
#include "worker/backend/backend.h"
#include "worker/model/dequantize.h"
#include "worker/model/gguf_parser.h"
#include "worker/model/llama_weights.h"
#include "worker/model/model_config.h"
#include "worker/model/model_fingerprint.h"
#include "worker/model/sampler.h"
#include "worker/model/tokenizer.h"

namespace heavywater {
namespace {

absl::StatusOr<GgufContents> Parse(const std::string& file) {
  return ParseGguf(std::as_bytes(std::span(file)));
}

TEST(GgufFuzzTest, AFileCutAnywhereIsRefused) {
  const std::string whole = SmallGguf().Finish();
  ASSERT_TRUE(Parse(whole).ok());
  for (size_t size = 0; size < whole.size(); ++size) {
    // A copy of its own, so that a sanitizer sees a read beyond its end.
    const std::vector<std::byte> cut(reinterpret_cast<const std::byte*>(whole.data()),
                                     reinterpret_cast<const std::byte*>(whole.data()) + size);
    const auto contents = ParseGguf(cut);
    ASSERT_FALSE(contents.ok()) << "cut to " << size << " of " << whole.size() << " bytes";
    EXPECT_EQ(contents.status().code(), absl::StatusCode::kDataLoss) << contents.status();
  }
}

void LoadWeights(const GgufFile& file) {
  const auto config = ReadModelConfig(file);
  if (!config.ok()) return;
  const auto backend = CreateReferenceBackend();
  for (const int ranks : {1, 3}) {
    const auto shard = MakeRankShard(*config, ranks - 1, ranks);
    if (shard.ok()) (void)LoadLlamaWeights(file, *config, *shard, *backend);
  }
}

void Tokenise(const GgufFile& file) {
  auto spec = ReadTokenizerSpec(file);
  if (!spec.ok()) return;
  const auto tokenizer = Tokenizer::Create(*std::move(spec));
  if (!tokenizer.ok()) return;
  const auto tokens = tokenizer->EncodePrompt(" bub <s>A\u00e9");
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  for (const int32_t token : *tokens) EXPECT_TRUE(tokenizer->TokenBytes(token).ok());
}

// Everything that the runner and the tokenizer read from a file.
void ReadAll(const std::string& bytes) {
  const auto contents = Parse(bytes);
  if (!contents.ok()) {
    EXPECT_FALSE(contents.status().message().empty());
    return;
  }
  for (const auto& [name, tensor] : contents->tensors) {
    std::vector<float> row(static_cast<size_t>(tensor.row_elements));
    DequantizeRows(tensor, 0, 1, row);
    DequantizeRows(tensor, tensor.rows - 1, 1, row);
  }
  const auto file = OpenGguf(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  LoadWeights(**file);
  Tokenise(**file);
  EXPECT_FALSE(ModelFingerprint(**file).empty());
}

// A tokenizer with tokens of every kind.
std::string SentencePieceFile() {
  return GgufWriter()
      .Field("tokenizer.ggml.model", "llama")
      .Field("tokenizer.ggml.tokens",
             std::vector<std::string>{"<unk>", "<s>", "<0x41>", "\u2581", "b", "\u2581b", "u"})
      .Field("tokenizer.ggml.scores", std::vector<float>{0, 0, 0, -1, -2, -3, -4})
      .Field("tokenizer.ggml.token_type", std::vector<int32_t>{2, 3, 6, 1, 1, 1, 4})
      .Field("tokenizer.ggml.unknown_token_id", uint32_t{0})
      .Field("tokenizer.ggml.bos_token_id", uint32_t{1})
      .Finish();
}

TEST(GgufFuzzTest, FlippedBitsNeverReachBeyondTheFile) {
  for (const std::string& whole :
       {SmallGguf().Finish(), TinyLlama({.layers = 1}, 1).File(), SentencePieceFile()}) {
    const size_t header = std::min<size_t>(whole.size(), 1400);
    for (size_t at = 0; at < header; ++at) {
      for (int bit = 0; bit < 8; ++bit) {
        std::string bytes = whole;
        bytes[at] = static_cast<char>(bytes[at] ^ (1 << bit));
        ReadAll(bytes);
      }
    }
  }
}

TEST(GgufFuzzTest, RandomBytesInTheHeaderNeverReachBeyondTheFile) {
  const std::string whole = SmallGguf().Finish();
  uint64_t drawn = 0;
  const auto below = [&](size_t limit) {
    return static_cast<size_t>(UniformAt(99, drawn++) * static_cast<double>(limit));
  };
  for (int round = 0; round < 20000; ++round) {
    std::string bytes = whole;
    const size_t changes = 1 + below(8);
    for (size_t i = 0; i < changes; ++i) {
      constexpr unsigned char kEdges[] = {0x00, 0x01, 0x7f, 0x80, 0xff};
      const size_t kind = below(10);
      bytes[8 + below(bytes.size() - 8)] = static_cast<char>(kind < 5 ? kEdges[kind] : below(256));
    }
    bytes.resize(bytes.size() - below(2) * below(64));
    ReadAll(bytes);
  }
}

}  // namespace
}  // namespace heavywater
