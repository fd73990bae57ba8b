#include "worker/model/gguf_file.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model/gguf_writer.h"
#include "worker/model/dequantize.h"

namespace heavywater {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(GgufFileTest, ReadsFieldsOfEveryKind) {
  const auto file = OpenGguf(SmallGguf().Finish());
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
  const auto file = OpenGguf(SmallGguf().Finish());
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
  const auto file = *OpenGguf(SmallGguf().Finish());
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
  EXPECT_EQ(OpenGguf("").status().code(), absl::StatusCode::kDataLoss);
}

}  // namespace
}  // namespace heavywater
