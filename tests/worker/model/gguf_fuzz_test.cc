// Damaged files: an error or a value, never a read beyond the file.
#include <algorithm>

#include "gtest/gtest.h"
#include "tests/worker/model/gguf_writer.h"
#include "tests/worker/model/tiny_llama.h"
#include "worker/model/dequantize.h"
#include "worker/model/gguf_parser.h"
#include "worker/model/model_config.h"
#include "worker/model/model_fingerprint.h"
#include "worker/model/sampler.h"
#include "worker/model/tokenizer_spec.h"

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
  (void)ReadModelConfig(**file);
  (void)ReadTokenizerSpec(**file);
  EXPECT_FALSE(ModelFingerprint(**file).empty());
}

TEST(GgufFuzzTest, FlippedBitsNeverReachBeyondTheFile) {
  for (const std::string& whole : {SmallGguf().Finish(), TinyLlama({.layers = 1}, 1).File()}) {
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
