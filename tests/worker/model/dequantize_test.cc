#include "worker/model/dequantize.h"

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/strings/escaping.h"
#include "gtest/gtest.h"

namespace heavywater {
namespace {

TensorType TypeNamed(const std::string& name) {
  for (uint32_t number = 0; number < 64; ++number) {
    const auto type = static_cast<TensorType>(number);
    if (TensorTypeName(type) == name) return type;
  }
  ADD_FAILURE() << "unknown type " << name;
  return TensorType::kF32;
}

// A tensor over `bytes` with rows of `row_elements`.
GgufTensor View(TensorType type, int64_t row_elements, const std::string& bytes) {
  const TensorBlock block = *TensorBlockOf(type);
  GgufTensor tensor;
  tensor.type = type;
  tensor.row_elements = row_elements;
  tensor.row_bytes = row_elements / block.elements * block.bytes;
  tensor.rows = static_cast<int64_t>(bytes.size()) / tensor.row_bytes;
  tensor.data = std::as_bytes(std::span(bytes));
  return tensor;
}

TEST(DequantizeTest, GivesTheValuesOfTheGgufPackage) {
  std::ifstream stream(HEAVYWATER_SOURCE_DIR "/tests/worker/model/testdata/dequantize_cases.json");
  const nlohmann::json cases = nlohmann::json::parse(stream);
  ASSERT_EQ(cases.size(), 10u) << "all types but F32, in which nothing is decoded";
  for (const auto& entry : cases) {
    const TensorType type = TypeNamed(entry.at("type"));
    const std::string bytes = absl::HexStringToBytes(entry.at("bytes").get<std::string>());
    const std::vector<float> want = entry.at("values");
    std::vector<float> got(want.size());
    const GgufTensor tensor = View(type, static_cast<int64_t>(want.size()), bytes);
    DequantizeRows(tensor, 0, 1, got);
    EXPECT_EQ(got, want) << TensorTypeName(type);
  }
}

TEST(DequantizeTest, ReadsOnlyTheRowsAskedFor) {
  std::string bytes;
  for (int row = 0; row < 4; ++row) {  // scale 1, all quants equal to the row
    bytes += std::string("\x00\x3c", 2) + std::string(32, static_cast<char>(row));
  }
  std::vector<float> got(64, -1);
  DequantizeRows(View(TensorType::kQ8_0, 32, bytes), 1, 2, got);
  EXPECT_EQ(got[0], 1);
  EXPECT_EQ(got[31], 1);
  EXPECT_EQ(got[32], 2);
  EXPECT_EQ(got[63], 2);
}

TEST(DequantizeTest, HalvesConvertExactlyIncludingWhatIsNotFinite) {
  EXPECT_EQ(HalfToFloat(0x3c00), 1.0f);
  EXPECT_EQ(HalfToFloat(0x0001), 0x1p-24f);
  EXPECT_EQ(HalfToFloat(0x83ff), -0x3ffp-24f);
  EXPECT_TRUE(std::signbit(HalfToFloat(0x8000)));
  EXPECT_EQ(HalfToFloat(0x7c00), INFINITY);
  EXPECT_EQ(HalfToFloat(0xfc00), -INFINITY);
  EXPECT_TRUE(std::isnan(HalfToFloat(0x7e00)));
}

}  // namespace
}  // namespace heavywater
