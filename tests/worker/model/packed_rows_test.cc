// Packed weights stand for the very floats of the file, on every instruction set.
#include "worker/model/packed_rows.h"

#include <cstring>
#include <span>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/model/every_target.h"
#include "worker/model/dequantize.h"
#include "worker/model/packed_matmul.h"
#include "worker/model/sampler.h"

namespace heavywater {
namespace {

constexpr TensorType kTypes[] = {TensorType::kF32,  TensorType::kF16,  TensorType::kBF16,
                                 TensorType::kQ4_0, TensorType::kQ4_1, TensorType::kQ5_0,
                                 TensorType::kQ5_1, TensorType::kQ8_0, TensorType::kQ4_K,
                                 TensorType::kQ5_K, TensorType::kQ6_K};
constexpr int64_t kRows = 11;
constexpr int64_t kCols = 768;  // whole blocks of every type

// A tensor of random bits whose numbers are all finite.
class RandomTensor {
 public:
  explicit RandomTensor(TensorType type) {
    const TensorBlock block = TensorBlockOf(type).value();
    tensor_.type = type;
    tensor_.rows = kRows;
    tensor_.row_elements = kCols;
    tensor_.row_bytes = kCols / block.elements * block.bytes;
    bytes_.resize(static_cast<size_t>(kRows * tensor_.row_bytes));
    for (size_t i = 0; i < bytes_.size(); ++i) {
      bytes_[i] = static_cast<std::byte>(UniformAt(static_cast<uint64_t>(type) + 1, i) * 256);
    }
    for (size_t i = 0; i < bytes_.size(); i += static_cast<size_t>(block.bytes)) {
      MakeFinite(type, &bytes_[i]);
    }
    tensor_.data = bytes_;
  }

  const GgufTensor& tensor() const { return tensor_; }

  std::vector<float> Floats() const {
    std::vector<float> values(kRows * kCols);
    DequantizeRows(tensor_, 0, kRows, values);
    return values;
  }

 private:
  // Clears the top bit of a block's exponents.
  static void MakeFinite(TensorType type, std::byte* block) {
    const auto clear = [&](int at) { block[at] &= std::byte{0xbf}; };
    switch (type) {
      case TensorType::kF32:
        return clear(3);
      case TensorType::kF16:
      case TensorType::kBF16:
      case TensorType::kQ4_0:
      case TensorType::kQ5_0:
      case TensorType::kQ8_0:
        return clear(1);
      case TensorType::kQ6_K:
        return clear(209);
      default:
        clear(1);
        return clear(3);
    }
  }

  std::vector<std::byte> bytes_;
  GgufTensor tensor_;
};

std::vector<std::byte> Pack(const GgufTensor& tensor, const Range& columns, RowCodec codec) {
  const int64_t row_bytes = PackedRowBytes(codec, columns.size);
  std::vector<std::byte> packed(static_cast<size_t>(tensor.rows * row_bytes));
  for (int64_t r = 0; r < tensor.rows; ++r) {
    PackRow(tensor, r, columns, codec, packed.data() + r * row_bytes);
  }
  return packed;
}

class PackedRowsTest : public EveryTargetTest {};

TEST_P(PackedRowsTest, UnpackToTheFloatsOfTheFile) {
  for (const TensorType type : kTypes) {
    const RandomTensor random(type);
    const std::vector<float> want = random.Floats();
    for (const Range& columns : {Range{0, kCols}, Range{256, 256}, Range{256, 512}, Range{32, 160},
                                 Range{224, 64}, Range{512, 32}}) {
      const RowCodec codec = CodecFor(random.tensor(), columns);
      EXPECT_EQ(codec == RowCodec::kFloat32, type == TensorType::kF32) << TensorTypeName(type);
      const auto packed = Pack(random.tensor(), columns, codec);
      std::vector<float> got(static_cast<size_t>(kRows * columns.size));
      UnpackRows(packed.data(), codec, kRows, columns.size, got.data());
      for (int64_t i = 0; i < kRows * columns.size; ++i) {
        const int64_t at = i / columns.size * kCols + columns.begin + i % columns.size;
        ASSERT_EQ(got[static_cast<size_t>(i)], want[static_cast<size_t>(at)])
            << TensorTypeName(type) << " as " << RowCodecName(codec) << ", value " << i;
      }
    }
  }
}

TEST_P(PackedRowsTest, ColumnsThatAreNotWholeBlocksBecomeFloats) {
  for (const TensorType type : kTypes) {
    const RandomTensor random(type);
    const std::vector<float> want = random.Floats();
    const Range columns{8, 40};
    ASSERT_EQ(CodecFor(random.tensor(), columns), RowCodec::kFloat32) << TensorTypeName(type);
    const auto packed = Pack(random.tensor(), columns, RowCodec::kFloat32);
    EXPECT_EQ(std::memcmp(packed.data(), &want[8], 40 * sizeof(float)), 0) << TensorTypeName(type);
  }
}

TEST_P(PackedRowsTest, RowsOfSeveralTypesShareACodec) {
  const Range columns{0, kCols};
  for (const TensorType a : kTypes) {
    for (const TensorType b : kTypes) {
      const RandomTensor random(a);
      const RowCodec codec = CommonCodec(CodecFor(random.tensor(), columns),
                                         CodecFor(RandomTensor(b).tensor(), columns));
      const auto packed = Pack(random.tensor(), columns, codec);
      std::vector<float> got(kRows * kCols);
      UnpackRows(packed.data(), codec, kRows, kCols, got.data());
      EXPECT_EQ(got, random.Floats()) << TensorTypeName(a) << " beside " << TensorTypeName(b);
    }
  }
}

TEST_P(PackedRowsTest, ProductsHaveTheSameBitsAsThoseOfTheFloats) {
  std::vector<float> x(16 * kCols);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(UniformAt(99, i) - 0.5);
  const auto multiply = [&](const std::byte* weights, RowCodec codec, int64_t tokens) {
    std::vector<float> out(static_cast<size_t>(tokens * kRows));
    PackedMatmul({.weights = weights,
                  .codec = codec,
                  .rows = kRows,
                  .cols = kCols,
                  .x = x.data(),
                  .tokens = tokens,
                  .out = out.data(),
                  .out_stride = kRows});
    return out;
  };
  for (const TensorType type : kTypes) {
    const RandomTensor random(type);
    const std::vector<float> floats = random.Floats();
    const RowCodec codec = CodecFor(random.tensor(), {0, kCols});
    const auto packed = Pack(random.tensor(), {0, kCols}, codec);
    for (const int64_t tokens : {1, 2, 3, 4, 5, 7, 8, 9, 16}) {
      const auto want =
          multiply(std::as_bytes(std::span(floats)).data(), RowCodec::kFloat32, tokens);
      EXPECT_EQ(multiply(packed.data(), codec, tokens), want)
          << TensorTypeName(type) << " as " << RowCodecName(codec) << ", " << tokens << " tokens";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(AllTargets, PackedRowsTest, testing::ValuesIn(AllTargets()), TargetOf);

}  // namespace
}  // namespace heavywater
