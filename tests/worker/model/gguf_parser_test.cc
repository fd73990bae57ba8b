#include "worker/model/gguf_parser.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model/gguf_writer.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::StatusOr<GgufContents> Parse(const std::string& file) {
  return ParseGguf(std::as_bytes(std::span(file)));
}

TEST(GgufParserTest, RefusesWhatIsNoGgufFileOfAKnownVersion) {
  std::string file = SmallGguf().Finish();
  file[4] = 9;
  EXPECT_EQ(Parse(file).status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(Parse(file).status().message(), HasSubstr("version is 9"));
  file[0] = 'X';
  EXPECT_EQ(Parse(file).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST(GgufParserTest, NamesTheTensorAndTypeThatItCannotRead) {
  GgufWriter writer;
  writer.RawTensor("blk.0.attn_q.weight", static_cast<TensorType>(10), {256}, std::string(144, 0));
  const auto contents = Parse(writer.Finish());
  EXPECT_EQ(contents.status().code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(contents.status().message(),
              AllOf(HasSubstr("'blk.0.attn_q.weight'"), HasSubstr("Q2_K"), HasSubstr("Q4_1")));
}

TEST(GgufParserTest, NamesAFieldOrTensorThatOccursTwice) {
  EXPECT_THAT(Parse(SmallGguf().Field("text", "again").Finish()).status().message(),
              HasSubstr("field 'text' occurs twice"));
  EXPECT_THAT(Parse(SmallGguf().Tensor("matrix", 0, 1, {1}).Finish()).status().message(),
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

}  // namespace
}  // namespace heavywater
