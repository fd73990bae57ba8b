#include "worker/model/safetensors_parser.h"

#include <nlohmann/json.hpp>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/model/gguf_writer.h"
#include "tests/worker/model/tiny_checkpoint.h"
#include "worker/model/dequantize.h"
#include "worker/model/json_fields.h"
#include "worker/model/model_file.h"
#include "worker/model/sampler.h"

namespace heavywater {
namespace {

using ::testing::HasSubstr;

// A copy of its own, so that a sanitizer sees a read beyond its end.
absl::Status Parse(std::string_view file) {
  const std::vector<std::byte> bytes(reinterpret_cast<const std::byte*>(file.data()),
                                     reinterpret_cast<const std::byte*>(file.data()) + file.size());
  const auto contents = ParseSafetensors(bytes);
  if (!contents.ok()) {
    EXPECT_FALSE(contents.status().message().empty());
    return contents.status();
  }
  for (const GgufTensor& tensor : contents->tensors) {
    std::vector<float> row(static_cast<size_t>(tensor.row_elements));
    DequantizeRows(tensor, tensor.rows - 1, 1, row);
  }
  return absl::OkStatus();
}

std::string WithHeader(std::string_view header, size_t data_bytes) {
  return ByteSink()
      .Put<uint64_t>(header.size())
      .Bytes(header)
      .Bytes(std::string(data_bytes, '\1'))
      .bytes();
}

std::string Small() {
  return SafetensorsFile({{"a", {2, 3}, {1, 2, 3, 4, 5, 6}}, {"b", {4}, {7, 8, 9, 10}}}, "F32");
}

TEST(SafetensorsParserTest, FindsTensorsOfOneAndTwoDimensions) {
  const std::string file = Small();
  const auto contents = ParseSafetensors(std::as_bytes(std::span(file)));
  ASSERT_TRUE(contents.ok()) << contents.status();
  ASSERT_EQ(contents->tensors.size(), 2u);
  const GgufTensor& a = contents->tensors[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.rows, 2);
  EXPECT_EQ(a.row_elements, 3);
  std::vector<float> row(3);
  DequantizeRows(a, 1, 1, row);
  EXPECT_EQ(row, (std::vector<float>{4, 5, 6}));
  EXPECT_EQ(contents->tensors[1].rows, 1);
  EXPECT_EQ(contents->tensors[1].row_elements, 4);
}

TEST(SafetensorsParserTest, NamesWhatIsWrongWithAHeader) {
  const auto message = [](std::string_view header, size_t data_bytes) {
    return std::string(Parse(WithHeader(header, data_bytes)).message());
  };
  EXPECT_THAT(message("[]", 0), HasSubstr("not one JSON object"));
  EXPECT_THAT(message("{\"x\": ", 0), HasSubstr("not one JSON object"));
  EXPECT_THAT(message(R"({"x": 1})", 0), HasSubstr("tensor 'x' is no object"));
  EXPECT_THAT(message(R"({"x": {"dtype":"I8","shape":[4],"data_offsets":[0,4]}})", 4),
              HasSubstr("'x' has type 'I8', want one of F32, F16, BF16"));
  EXPECT_THAT(message(R"({"x": {"dtype":"F32","shape":[1,1,1],"data_offsets":[0,4]}})", 4),
              HasSubstr("'x' has 3 dimensions, want 1 or 2"));
  EXPECT_THAT(message(R"({"x": {"dtype":"F32","shape":[-1],"data_offsets":[0,4]}})", 4),
              HasSubstr("'x' has a dimension that is no size"));
  EXPECT_THAT(
      message(R"({"x": {"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}})", 4),
      HasSubstr("'x' has a dimension that is no size"));
  EXPECT_THAT(message(R"({"x": {"dtype":"F32","shape":[1],"data_offsets":[4,0]}})", 4),
              HasSubstr("'x' lies at [4, 0), but its shape takes 4 bytes"));
  EXPECT_THAT(message(R"({"x": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 4),
              HasSubstr("'x' ends at offset 8, but the file has only 4"));
  EXPECT_THAT(message(R"({"x": {"dtype":"F32","shape":[2],"data_offsets":[0,8]}})", 12),
              HasSubstr("4 bytes behind the last tensor"));
  EXPECT_THAT(message(R"({"x": {"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                          "y": {"dtype":"F32","shape":[2],"data_offsets":[4,12]}})",
                      12),
              HasSubstr("tensor 'y' is at offset 4, want 8"));
  EXPECT_THAT(message(R"({"x": {"dtype":"F32","shape":[1],"data_offsets":[4,8]}})", 8),
              HasSubstr("tensor 'x' is at offset 4, want 0"));
}

TEST(SafetensorsParserTest, RefusesLengthsBeyondTheFileAndTheLimit) {
  EXPECT_EQ(Parse(ByteSink().Put<uint64_t>(~uint64_t{0}).bytes()).code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Parse(ByteSink().Put<uint64_t>(1000).Bytes("{}").bytes()).code(),
            absl::StatusCode::kDataLoss);
  // Deeply nested: neither the stack nor the memory runs out.
  const std::string deep = "{\"x\": " + std::string(1 << 20, '[') + std::string(1 << 20, ']') + "}";
  EXPECT_THAT(std::string(Parse(WithHeader(deep, 0)).message()),
              HasSubstr("deeper than 100 levels"));
}

TEST(SafetensorsParserTest, AFileCutAnywhereIsRefused) {
  const std::string whole = Small();
  ASSERT_TRUE(Parse(whole).ok());
  for (size_t size = 0; size < whole.size(); ++size) {
    EXPECT_FALSE(Parse(whole.substr(0, size)).ok()) << "cut to " << size;
  }
}

TEST(SafetensorsParserTest, DamagedHeadersNeverReachBeyondTheFile) {
  const std::string whole = Small();
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string bytes = whole;
      bytes[at] = static_cast<char>(bytes[at] ^ (1 << bit));
      (void)Parse(bytes);
    }
  }
  uint64_t drawn = 0;
  const auto below = [&](size_t limit) {
    return static_cast<size_t>(UniformAt(5, drawn++) * static_cast<double>(limit));
  };
  for (int round = 0; round < 5000; ++round) {
    std::string bytes = whole;
    for (size_t i = 0; i <= below(6); ++i) {
      constexpr std::string_view kPieces = "0123456789[]{},:\"-e.\\\xff";
      bytes[8 + below(bytes.size() - 8)] = kPieces[below(kPieces.size())];
    }
    (void)Parse(bytes);
  }
}

TEST(SafetensorsFolderTest, NamesWhatIsMissingOrDoesNotFit) {
  const TinyCheckpoint checkpoint = RecordedCheckpoints().front();
  const auto message = [&](auto spoil) {
    const TemporaryFolder folder;
    checkpoint.WriteFolder(folder);
    spoil(folder);
    return std::string(OpenModel(folder.path()).status().message());
  };
  EXPECT_EQ(message([](const TemporaryFolder&) {}), "");
  const auto index = [](const char* text) {
    return [text](const TemporaryFolder& folder) {
      folder.Write("model.safetensors.index.json", text);
    };
  };
  EXPECT_THAT(message(index("{}")), HasSubstr("'weight_map' is missing"));
  EXPECT_THAT(message(index(R"({"weight_map": {"x": "../model.safetensors"}})")),
              HasSubstr("the file of tensor 'x' is '../model.safetensors'"));
  EXPECT_THAT(message(index(R"({"weight_map": {"x": "gone.safetensors"}})")),
              HasSubstr("gone.safetensors"));
  EXPECT_THAT(message(index(R"({"weight_map": {"x": "model.safetensors"}})")),
              HasSubstr("tensor 'x' is in none of the files"));
  EXPECT_THAT(message([&](const TemporaryFolder& folder) {
                folder.Write("again.safetensors", SafetensorsFile(checkpoint.tensors(), "F32"));
                folder.Write("model.safetensors.index.json",
                             R"({"weight_map": {"model.norm.weight": "model.safetensors",
                                 "lm_head.weight": "again.safetensors"}})");
              }),
              HasSubstr("is in two files"));
  EXPECT_THAT(
      message([](const TemporaryFolder& folder) { folder.Write("model.safetensors", "short"); }),
      HasSubstr("model.safetensors: length of the header"));
  const TemporaryFolder empty;
  EXPECT_THAT(std::string(OpenModel(empty.path()).status().message()), HasSubstr("config.json"));
}

TEST(JsonFieldsTest, RefusesMoreBytesOrValuesThanAnyFileHas) {
  EXPECT_TRUE(ParseJsonObject(R"({"a": [1, 2]})").ok());
  EXPECT_EQ(ParseJsonObject(R"({"a": [1, 2]})", 12).status().code(),
            absl::StatusCode::kResourceExhausted);
  std::string many = R"({"text": ",,[[", "a": [0)";
  for (int i = 0; i < 4'000'000; ++i) many += ",0";
  EXPECT_EQ(ParseJsonObject(many + "]}").status().code(), absl::StatusCode::kResourceExhausted);
}

TEST(SafetensorsFolderTest, IsNamedAfterItsFolderWithOrWithoutASlashBehindIt) {
  const TinyCheckpoint checkpoint = RecordedCheckpoints().front();
  const TemporaryFolder folder;
  checkpoint.WriteFolder(folder);
  const auto name = [](const std::string& path) { return (*OpenModel(path))->ReadConfig()->name; };
  EXPECT_FALSE(name(folder.path()).empty());
  EXPECT_EQ(name(folder.path() + "/"), name(folder.path()));
}

}  // namespace
}  // namespace heavywater
