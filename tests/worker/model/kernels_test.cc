// The vector kernels on every instruction set that this machine has.
#include <cmath>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/model/every_target.h"
#include "worker/model/packed_matmul.h"
#include "worker/model/rope_angles.h"
#include "worker/model/sampler.h"
#include "worker/model/vector_ops.h"

namespace heavywater {
namespace {

class KernelsTest : public EveryTargetTest {};

// In [-2, 2).
std::vector<float> Random(size_t size, uint64_t seed) {
  std::vector<float> values;
  for (size_t i = 0; i < size; ++i) {
    values.push_back(static_cast<float>(4 * UniformAt(seed, i) - 2));
  }
  return values;
}

struct FloatProduct {
  const float* weights;
  int64_t rows;
  int64_t cols;
  const float* x;
  int64_t tokens;
  float* out;
  int64_t out_stride;
};
void Multiply(const FloatProduct& of) {
  PackedMatmul({.weights = reinterpret_cast<const std::byte*>(of.weights),
                .rows = of.rows,
                .cols = of.cols,
                .x = of.x,
                .tokens = of.tokens,
                .out = of.out,
                .out_stride = of.out_stride});
}

TEST_P(KernelsTest, MatmulSumsProductsForAnyShape) {
  for (const int64_t cols : {1, 7, 16, 48, 100}) {
    for (const int64_t rows : {1, 3, 8, 13}) {
      for (const int64_t tokens : {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16}) {
        const auto weights = Random(static_cast<size_t>(rows * cols), 1);
        const auto x = Random(static_cast<size_t>(tokens * cols), 2);
        const int64_t stride = rows + 2;
        std::vector<float> out(static_cast<size_t>(tokens * stride), -99.0f);
        Multiply({weights.data(), rows, cols, x.data(), tokens, out.data(), stride});
        for (int64_t t = 0; t < tokens; ++t) {
          for (int64_t r = 0; r < rows; ++r) {
            double want = 0;
            for (int64_t c = 0; c < cols; ++c) {
              want += double{weights[static_cast<size_t>(r * cols + c)]} *
                      x[static_cast<size_t>(t * cols + c)];
            }
            ASSERT_NEAR(out[static_cast<size_t>(t * stride + r)], want, 1e-4)
                << rows << " x " << cols << ", token " << t << " of " << tokens;
          }
          EXPECT_EQ(out[static_cast<size_t>(t * stride + rows)], -99.0f) << "wrote beyond a row";
        }
      }
    }
  }
}

TEST_P(KernelsTest, MatmulGivesATokenTheSameBitsInEveryBatch) {
  constexpr int64_t kRows = 37;
  constexpr int64_t kCols = 91;
  const auto weights = Random(kRows * kCols, 3);
  const auto x = Random(11 * kCols, 4);
  std::vector<float> all(11 * kRows);
  Multiply({weights.data(), kRows, kCols, x.data(), 11, all.data(), kRows});
  for (int64_t first = 0; first < 11; ++first) {
    for (int64_t count = 1; first + count <= 11; ++count) {
      std::vector<float> some(static_cast<size_t>(count * kRows));
      Multiply({weights.data(), kRows, kCols, x.data() + first * kCols, count, some.data(), kRows});
      ASSERT_TRUE(std::equal(some.begin(), some.end(), all.begin() + first * kRows))
          << count << " tokens from " << first;
    }
  }
}

TEST_P(KernelsTest, RmsNormDividesByTheRootOfTheMeanSquare) {
  for (const size_t size : {1u, 15u, 48u, 101u}) {
    const auto x = Random(size, 5);
    const auto weight = Random(size, 6);
    double sum = 0;
    for (const float value : x) sum += double{value} * value;
    const double factor = 1 / std::sqrt(sum / static_cast<double>(size) + 0.01);
    std::vector<float> out = x;
    RmsNorm(out.data(), weight.data(), 0.01f, static_cast<int64_t>(size), out.data());
    for (size_t i = 0; i < size; ++i) EXPECT_NEAR(out[i], x[i] * factor * weight[i], 1e-5);
  }
}

TEST_P(KernelsTest, SiluMultiplyStaysFiniteForLargeGates) {
  std::vector<float> gate = {-3e38f, -1e4f, -100, -88.5f, -20, -1, 0, 1, 20, 100, 1e4f, 3e38f};
  const std::vector<float> up(gate.size(), 0.5f);
  std::vector<float> out(gate.size());
  SiluMultiply(gate.data(), up.data(), static_cast<int64_t>(gate.size()), out.data());
  for (size_t i = 0; i < gate.size(); ++i) {
    const double want = 0.5 * gate[i] / (1 + std::exp(-double{gate[i]}));
    EXPECT_NEAR(out[i], want, 1e-6 * std::fabs(want) + 1e-6) << "gate " << gate[i];
  }
}

TEST_P(KernelsTest, AddToAddsEveryElement) {
  const auto x = Random(53, 7);
  std::vector<float> sum = Random(53, 8);
  const std::vector<float> before = sum;
  AddTo(x.data(), 53, sum.data());
  for (size_t i = 0; i < sum.size(); ++i) EXPECT_EQ(sum[i], before[i] + x[i]);
}

TEST_P(KernelsTest, LogSumExpIsThatOfDoublesForAnyLength) {
  for (const int64_t size : {1, 3, 8, 17, 1000, 49152}) {
    auto x = Random(static_cast<size_t>(size), 3);
    for (float& value : x) value = value * 20 + 100;  // exp(x) alone overflows
    double sum = 0;
    for (const float value : x) sum += std::exp(static_cast<double>(value) - 100);
    EXPECT_NEAR(LogSumExp(x.data(), size), 100 + std::log(sum), 1e-5) << size;
  }
}

TEST_P(KernelsTest, LogSumExpTakesImpossibleTokens) {
  std::vector<float> x(100, -std::numeric_limits<float>::infinity());
  x[70] = -3;
  EXPECT_NEAR(LogSumExp(x.data(), 100), -3, 1e-6);
}

TEST_P(KernelsTest, RotationTurnsEachPairByItsAngleAndKeepsItsLength) {
  constexpr int kHeadDim = 38;
  RopeAngles angles(kHeadDim, 10000.0, {});
  const std::vector<Position> positions = {0, 12345};
  angles.SetPositions(positions);
  const auto x = Random(kHeadDim, 9);
  std::vector<float> out(kHeadDim);
  RotateHalves(x.data(), angles.cosines(0), angles.sines(0), kHeadDim / 2, out.data());
  EXPECT_EQ(out, x) << "position 0 turns nothing";
  RotateHalves(x.data(), angles.cosines(1), angles.sines(1), kHeadDim / 2, out.data());
  for (int i = 0; i < kHeadDim / 2; ++i) {
    const double angle = 12345 * std::pow(10000.0, -2.0 * i / kHeadDim);
    const auto first = static_cast<size_t>(i);
    const auto second = static_cast<size_t>(i + kHeadDim / 2);
    EXPECT_NEAR(out[first], x[first] * std::cos(angle) - x[second] * std::sin(angle), 1e-5);
    EXPECT_NEAR(out[second], x[second] * std::cos(angle) + x[first] * std::sin(angle), 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(AllTargets, KernelsTest, testing::ValuesIn(AllTargets()), TargetOf);

}  // namespace
}  // namespace heavywater
