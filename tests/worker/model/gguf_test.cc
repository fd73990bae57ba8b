#include <cstring>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model/gguf_writer.h"
#include "tests/worker/model/tiny_llama.h"
#include "worker/model/dequantize.h"
#include "worker/model/gguf_file.h"
#include "worker/model/gguf_parser.h"
#include "worker/model/model_config.h"
#include "worker/model/model_fingerprint.h"
#include "worker/model/sampler.h"
#include "worker/model/tokenizer_spec.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A field of each kind and a tensor of each type.
GgufWriter SmallWriter() {
  GgufWriter writer;
  writer.Field("text", "hello")
      .Field("number", uint32_t{7})
      .Field("float", 0.5f)
      .Field("flag", true)
      .Field("texts", std::vector<std::string>{"a", "", "c"})
      .Field("numbers", std::vector<int32_t>{-1, 2});
  writer.RawField("negative", static_cast<uint32_t>(GgufType::kInt8), "\xfe");
  writer.Tensor("matrix", 2, 3, {1, 2, 3, 4, 5, 6});
  writer.RawTensor("quantised", TensorType::kQ8_0, {64, 2}, std::string(4 * 34, '\1'));
  writer.RawTensor("small", TensorType::kQ4_1, {32}, std::string(20, '\2'));
  writer.RawTensor("half", TensorType::kF16, {2, 2, 2}, std::string(16, '\3'));
  return writer;
}

absl::StatusOr<GgufContents> Parse(const std::string& file) {
  return ParseGguf(std::as_bytes(std::span(file)));
}

absl::StatusOr<std::unique_ptr<GgufFile>> Open(const std::string& bytes) {
  return GgufFile::Open(TemporaryFile(bytes).path());
}

TEST(GgufFileTest, ReadsFieldsOfEveryKind) {
  const auto file = Open(SmallWriter().Finish());
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_EQ(*(*file)->GetString("text"), "hello");
  EXPECT_EQ(*(*file)->GetInteger("number"), 7);
  EXPECT_EQ(*(*file)->GetInteger("negative"), -2);
  EXPECT_EQ(*(*file)->GetFloat("float"), 0.5);
  EXPECT_TRUE(*(*file)->GetBool("flag"));
  EXPECT_THAT(*(*file)->GetStrings("texts"), ElementsAre("a", "", "c"));
  EXPECT_THAT(*(*file)->GetInt32s("numbers"), ElementsAre(-1, 2));
}

TEST(GgufFileTest, ReadsTensorsAsRows) {
  const auto file = Open(SmallWriter().Finish());
  ASSERT_TRUE(file.ok()) << file.status();
  const GgufTensor matrix = *(*file)->GetTensor("matrix");
  EXPECT_EQ(matrix.rows, 2);
  EXPECT_EQ(matrix.row_elements, 3);
  std::vector<float> row(3);
  DequantizeRows(matrix, 1, 1, row);
  EXPECT_THAT(row, ElementsAre(4, 5, 6));
  EXPECT_EQ((*file)->GetTensor("quantised")->row_bytes, 68);
  EXPECT_EQ((*file)->GetTensor("small")->rows, 1);
  EXPECT_EQ((*file)->GetTensor("half")->rows, 4) << "all but the innermost dimension are rows";
  EXPECT_THAT((*file)->TensorNames(), ElementsAre("half", "matrix", "quantised", "small"));
}

TEST(GgufFileTest, NamesAMissingFieldOrOneOfAnotherType) {
  const auto file = *Open(SmallWriter().Finish());
  EXPECT_EQ(file->GetString("none").status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(file->GetString("none").status().message(), HasSubstr("'none'"));
  EXPECT_THAT(file->GetString("number").status().message(),
              AllOf(HasSubstr("'number' is uint32"), HasSubstr("want string")));
  EXPECT_THAT(file->GetInteger("text").status().message(), HasSubstr("'text' is string"));
  EXPECT_THAT(file->GetFloat("flag").status().message(), HasSubstr("'flag' is bool"));
  EXPECT_THAT(file->GetBool("float").status().message(), HasSubstr("'float' is float32"));
  EXPECT_THAT(file->GetStrings("numbers").status().message(), HasSubstr("'numbers' is int32"));
  EXPECT_THAT(file->GetInt32s("texts").status().message(), HasSubstr("'texts' is string"));
  EXPECT_EQ(file->GetTensor("none").status().code(), absl::StatusCode::kNotFound);
}

TEST(GgufFileTest, NamesAPathThatCannotBeRead) {
  const auto missing = GgufFile::Open("/nonexistent/model.gguf");
  EXPECT_EQ(missing.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(missing.status().message(), HasSubstr("/nonexistent/model.gguf"));
  EXPECT_FALSE(GgufFile::Open(testing::TempDir()).ok()) << "a directory";
  EXPECT_EQ(Open("").status().code(), absl::StatusCode::kDataLoss);
}

TEST(GgufParserTest, RefusesWhatIsNoGgufFileOfAKnownVersion) {
  std::string file = SmallWriter().Finish();
  file[4] = 9;
  EXPECT_EQ(Parse(file).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(Parse(file).status().message(), HasSubstr("version is 9"));
  file[0] = 'X';
  EXPECT_EQ(Parse(file).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(GgufParserTest, NamesTheTensorAndTypeThatItCannotRead) {
  GgufWriter writer;
  writer.RawTensor("blk.0.attn_q.weight", static_cast<TensorType>(12), {256}, std::string(144, 0));
  const auto contents = Parse(writer.Finish());
  EXPECT_EQ(contents.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(contents.status().message(),
              AllOf(HasSubstr("'blk.0.attn_q.weight'"), HasSubstr("Q4_K"), HasSubstr("Q4_1")));
}

TEST(GgufParserTest, NamesAFieldOrTensorThatOccursTwice) {
  EXPECT_THAT(Parse(SmallWriter().Field("text", "again").Finish()).status().message(),
              HasSubstr("field 'text' occurs twice"));
  EXPECT_THAT(Parse(SmallWriter().Tensor("matrix", 0, 1, {1}).Finish()).status().message(),
              HasSubstr("tensor 'matrix' occurs twice"));
}

TEST(GgufParserTest, RefusesShapesThatCannotBe) {
  const auto shaped = [](const std::vector<uint64_t>& dimensions, TensorType type) {
    return std::string(
        Parse(GgufWriter().RawTensor("t", type, dimensions, "").Finish()).status().message());
  };
  EXPECT_THAT(shaped({0}, TensorType::kF32), HasSubstr("dimension of 0"));
  EXPECT_THAT(shaped({1u << 31, 1u << 31}, TensorType::kF32), HasSubstr("at most"));
  EXPECT_THAT(shaped({uint64_t{1} << 63, 2}, TensorType::kF32), HasSubstr("at most"));
  EXPECT_THAT(shaped({33}, TensorType::kQ8_0), HasSubstr("a multiple of 32"));
  EXPECT_THAT(shaped({}, TensorType::kF32), HasSubstr("has 0 dimensions"));
  EXPECT_THAT(shaped({1, 1, 1, 1, 1}, TensorType::kF32), HasSubstr("5 dimensions"));
  EXPECT_THAT(shaped({8}, TensorType::kF32), HasSubstr("has 32 bytes at offset 0"));
}

TEST(GgufParserTest, CountsAboveTheLimitsAreRefusedBeforeMemoryIsTaken) {
  const auto huge = uint64_t{1} << 60;
  const auto header = [](uint64_t tensors, uint64_t fields) {
    return ByteSink().Bytes("GGUF").Put<uint32_t>(3).Put(tensors).Put(fields).bytes();
  };
  EXPECT_EQ(Parse(header(huge, 0)).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Parse(header(0, huge)).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Parse(header(1000, 0)).status().code(), absl::StatusCode::kDataLoss);
  const auto field = [&](uint32_t type, const std::string& bytes) {
    return Parse(GgufWriter().RawField("f", type, bytes).Finish()).status();
  };
  EXPECT_EQ(field(8, ByteSink().Put(huge).bytes()).code(), absl::StatusCode::kResourceExhausted);
  // Arrays: too many; more than is there; of strings; nested.
  const auto array = [](uint32_t type, uint64_t count) {
    return ByteSink().Put(type).Put(count).bytes();
  };
  EXPECT_EQ(field(9, array(4, huge)).code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(field(9, array(4, 1 << 24)).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(field(9, array(8, 1 << 24)).code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(field(9, array(9, 1)).message()), HasSubstr("'f' is an array of array"));
  EXPECT_THAT(std::string(field(77, "").message()), HasSubstr("'f' has unknown type 77"));
}

TEST(GgufParserTest, EscapesNamesFromTheFileInMessages) {
  const auto contents =
      Parse(GgufWriter().RawField("a\n\x01" + std::string(300, 'x'), 77, "").Finish());
  const std::string message(contents.status().message());
  EXPECT_THAT(message, HasSubstr("\\n\\x01"));
  EXPECT_LT(message.size(), 200u);
}

TEST(GgufParserTest, AFileCutAnywhereIsRefused) {
  const std::string whole = SmallWriter().Finish();
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
  const auto file = Open(bytes);
  ASSERT_TRUE(file.ok()) << file.status();
  (void)ReadModelConfig(**file);
  (void)ReadTokenizerSpec(**file);
  EXPECT_FALSE(ModelFingerprint(**file).empty());
}

TEST(GgufParserTest, FlippedBitsNeverReachBeyondTheFile) {
  for (const std::string& whole : {SmallWriter().Finish(), TinyLlama({.layers = 1}, 1).File()}) {
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

TEST(GgufParserTest, RandomBytesInTheHeaderNeverReachBeyondTheFile) {
  const std::string whole = SmallWriter().Finish();
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

TEST(ModelConfigTest, ReadsTheSizes) {
  const auto config = ReadModelConfig(**Open(TinyLlama({.tied = false}, 1).File()));
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->name, "tiny");
  EXPECT_EQ(config->num_layers, 2);
  EXPECT_EQ(config->num_query_heads, 6);
  EXPECT_EQ(config->num_kv_heads, 3);
  EXPECT_EQ(config->head_dim, 10);
  EXPECT_EQ(config->vocab_size, 100);
  EXPECT_FALSE(config->tied_embeddings);
}

TEST(ModelConfigTest, NamesWhatItCannotCompute) {
  const auto message = [](const GgufWriter& writer) {
    return std::string(ReadModelConfig(**Open(writer.Finish())).status().message());
  };
  EXPECT_THAT(message(GgufWriter().Field("general.architecture", "gpt2")),
              AllOf(HasSubstr("'general.architecture' is 'gpt2'"), HasSubstr("want 'llama'")));
  const TinyLlama model({}, 1);
  EXPECT_THAT(message(model.Writer().Field("llama.expert_count", uint32_t{8})),
              HasSubstr("'llama.expert_count' is 8"));
  EXPECT_THAT(message(model.Writer().Field("llama.rope.scaling.type", "yarn")),
              HasSubstr("'llama.rope.scaling.type' is 'yarn'"));
  EXPECT_THAT(message(model.Writer().Field("llama.rope.dimension_count", uint32_t{8})),
              HasSubstr("'llama.rope.dimension_count' is 8, want the head size, 10"));
  EXPECT_THAT(message(model.Writer().Field("llama.vocab_size", uint32_t{99})),
              HasSubstr("'llama.vocab_size' is 99"));
  EXPECT_THAT(message(TinyLlama({.query_heads = 5}, 1).Writer()),
              HasSubstr("'llama.attention.head_count' is 5"));
  EXPECT_THAT(message(TinyLlama({.head_dim = 9}, 1).Writer()), HasSubstr("an even number"));
}

TEST(ModelFingerprintTest, DiffersWhenAFieldOrATensorDiffers) {
  const TinyLlama model({.layers = 1}, 1);
  const auto fingerprint = [](const std::string& bytes) { return ModelFingerprint(**Open(bytes)); };
  const std::string whole = model.File();
  EXPECT_EQ(fingerprint(whole), fingerprint(model.File()));
  EXPECT_NE(fingerprint(whole), fingerprint(TinyLlama({.layers = 1}, 2).File()));
  EXPECT_NE(fingerprint(whole), fingerprint(model.Writer().Field("x", true).Finish()));
  std::string last_byte = whole;
  last_byte.back() = static_cast<char>(last_byte.back() ^ 1);
  EXPECT_NE(fingerprint(whole), fingerprint(last_byte));
}

TEST(TokenizerSpecTest, RefusesOtherTokenizersNamingTheField) {
  const auto message = [](const GgufWriter& writer) {
    return std::string(ReadTokenizerSpec(**Open(writer.Finish())).status().message());
  };
  EXPECT_THAT(message(GgufWriter().Field("tokenizer.ggml.model", "llama")),
              AllOf(HasSubstr("'tokenizer.ggml.model' is 'llama'"), HasSubstr("want 'gpt2'")));
  const auto writer = [](std::vector<int32_t> types) {
    return GgufWriter()
        .Field("tokenizer.ggml.model", "gpt2")
        .Field("tokenizer.ggml.pre", "smollm")
        .Field("tokenizer.ggml.tokens", std::vector<std::string>{"a", "b"})
        .Field("tokenizer.ggml.merges", std::vector<std::string>{})
        .Field("tokenizer.ggml.token_type", types);
  };
  EXPECT_TRUE(ReadTokenizerSpec(**Open(writer({1, 1}).Finish())).ok());
  EXPECT_THAT(message(writer({1})), HasSubstr("has 1 elements, want 2"));
  EXPECT_THAT(message(writer({1, 1}).Field("tokenizer.ggml.eos_token_id", uint32_t{2})),
              HasSubstr("'tokenizer.ggml.eos_token_id' is 2"));
  EXPECT_THAT(message(writer({1, 1}).Field("tokenizer.ggml.add_space_prefix", true)),
              HasSubstr("'tokenizer.ggml.add_space_prefix'"));
}

}  // namespace
}  // namespace heavywater
