// The scan's kernels alone, on every instruction set: Attend() uses the best.
#include "worker/backend/cpu/scan_kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "cache_service/base/float16.h"
#include "worker/backend/sketch.h"

namespace heavywater {
namespace {

struct Target {
  std::string name;
  CpuTarget target;
  bool dot_products;
};

class ScanKernelsTest : public testing::TestWithParam<Target> {
 protected:
  void SetUp() override {
    const auto name = CpuTargetName(GetParam().target);
    if (!ChooseCpuTarget(name).ok()) GTEST_SKIP() << "this machine lacks " << name;
  }
  const ScanKernels& kernels() const {
    return ScanKernelsOf(GetParam().target, GetParam().dot_products);
  }
};

INSTANTIATE_TEST_SUITE_P(All, ScanKernelsTest,
                         testing::Values(Target{"avx2", CpuTarget::kAvx2, true},
                                         Target{"avx512", CpuTarget::kAvx512, false},
                                         Target{"avx512_dot_products", CpuTarget::kAvx512, true}),
                         [](const auto& info) { return info.param.name; });

// A page and queries against it, with the workspace of their scan.
struct Scan {
  Scan(const SketchShape& shape, int heads) : page(shape.page_bytes()) {
    const int64_t num_chosen = PaddedRow(shape.channels);
    const int64_t num_others = PaddedRow(shape.head_dim - shape.channels);
    chosen.assign(heads * num_chosen, 0);
    others.assign(heads * num_others, 0);
    lse.assign(heads, 0);
    query.sketch = shape;
    query.num_heads = heads;
    query.chosen = chosen.data();
    query.others = others.data();
    query.lse = lse.data();
    floats.resize(4 * heads);
    sums.resize(heads * kSketchBlock);
    weights.resize(heads * num_chosen);
    query.constants = floats.data();
    query.units = query.constants + heads;
    query.offsets = query.units + heads;
    query.slopes = query.offsets + heads;
    query.sums = sums.data();
    query.weights = weights.data();
  }

  uint16_t* Table(int64_t offset) { return reinterpret_cast<uint16_t*>(page.data() + offset); }
  float* Chosen(int head) { return chosen.data() + head * PaddedRow(query.sketch.channels); }

  std::vector<std::byte> page;
  std::vector<float> chosen;
  std::vector<float> others;
  std::vector<float> lse;
  std::vector<float> floats;
  std::vector<int32_t> sums;
  std::vector<int8_t> weights;
  ScanQuery query;
};

TEST_P(ScanKernelsTest, TheLargestSumsOfEveryChannelCountFit) {
  for (int channels = 8; channels <= 256; channels += 8) {
    for (const float sign : {1.0f, -1.0f}) {
      const SketchShape shape{.head_dim = 256, .channels = channels, .page_tokens = 16};
      Scan scan(shape, 1);
      std::fill_n(scan.page.begin(), shape.code_bytes(), std::byte{0xff});  // codes 15
      std::fill_n(scan.Table(shape.steps_offset()), channels, FloatToFloat16(0.5f));
      std::fill_n(scan.Chosen(0), channels, sign * 0.25f);
      scan.lse[0] = sign * 0.125f * 15 * static_cast<float>(channels);  // the estimate itself
      const uint16_t all = 0xffff;
      double mass = 0;
      kernels().add_mass(scan.query, scan.page.data(), &all, &mass);
      EXPECT_NEAR(mass, 16, 0.01) << channels << " channels";
      PickCandidate found[16];
      EXPECT_EQ(kernels().find_candidates(scan.query, scan.page.data(), &all, 100, 0.99f, found),
                16);
      EXPECT_EQ(found[15].position, 115);
      EXPECT_EQ(kernels().find_candidates(scan.query, scan.page.data(), &all, 100, 1.01f, found),
                0);
    }
  }
}

Scan RandomScan(unsigned seed) {
  std::mt19937 rng(seed);
  const int head_dim = 64 + 16 * static_cast<int>(rng() % 13);
  const SketchShape shape{.head_dim = head_dim,
                          .channels = 8 * (1 + static_cast<int>(rng() % (head_dim / 8))),
                          .page_tokens = 64};
  Scan scan(shape, 1 + static_cast<int>(rng() % 13));
  std::normal_distribution<float> normal(0, 0.3f);
  for (int64_t i = 0; i < shape.code_bytes(); ++i) scan.page[i] = static_cast<std::byte>(rng());
  for (int i = 0; i < shape.channels; ++i) {
    scan.Table(shape.minima_offset())[i] = FloatToFloat16(normal(rng));
    scan.Table(shape.steps_offset())[i] = FloatToFloat16(std::abs(normal(rng)));
  }
  for (int i = 0; i < head_dim - shape.channels; ++i) {
    scan.Table(shape.means_offset())[i] = FloatToFloat16(normal(rng));
  }
  for (int head = 0; head < scan.query.num_heads; ++head) {
    for (int i = 0; i < shape.channels; ++i) scan.Chosen(head)[i] = normal(rng);
    float* others = scan.others.data() + head * PaddedRow(head_dim - shape.channels);
    for (int i = 0; i < head_dim - shape.channels; ++i) others[i] = normal(rng);
    scan.lse[head] = 5;
  }
  return scan;
}

// [position][head]
std::vector<std::vector<double>> PlainShares(Scan& scan) {
  const SketchShape& shape = scan.query.sketch;
  const SketchPage page = SketchPageAt(shape, scan.page.data());
  std::vector<std::vector<double>> shares(shape.page_tokens);
  for (int head = 0; head < scan.query.num_heads; ++head) {
    const float* others = scan.others.data() + head * PaddedRow(shape.head_dim - shape.channels);
    double constant = 0;
    std::vector<float> products(shape.channels);
    for (int i = 0; i < shape.channels; ++i) {
      constant += double{scan.Chosen(head)[i]} * Float16ToFloat(page.minima[i]);
      products[i] = scan.Chosen(head)[i] * Float16ToFloat(page.steps[i]);
    }
    for (int i = 0; i < shape.head_dim - shape.channels; ++i) {
      constant += double{others[i]} * Float16ToFloat(page.means[i]);
    }
    std::vector<int8_t> weights(shape.channels);
    const float unit = QuantizeWeights(products, weights.data());
    for (int row = 0; row < shape.page_tokens; ++row) {
      int sum = 0;
      for (int i = 0; i < shape.channels; ++i) {
        sum += weights[i] * SketchCode(shape, page, row, i);
      }
      shares[row].push_back(std::exp(constant + double{unit} * sum - scan.lse[head]));
    }
  }
  return shares;
}

TEST_P(ScanKernelsTest, SharesEqualThePlainFormulas) {
  int found_in_all = 0;
  for (unsigned seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    Scan scan = RandomScan(seed);
    const auto shares = PlainShares(scan);
    std::mt19937 rng(seed);
    std::vector<uint16_t> positions(4);
    for (uint16_t& word : positions) word = rng() % 3 == 0 ? 0 : static_cast<uint16_t>(rng());
    const float least = 0.01f;
    std::vector<PickCandidate> found(64);
    found.resize(kernels().find_candidates(scan.query, scan.page.data(), positions.data(), 640,
                                           least, found.data()));
    found_in_all += static_cast<int>(found.size());
    std::vector<double> expected_mass(scan.query.num_heads);
    size_t next = 0;
    for (int row = 0; row < 64; ++row) {
      if ((positions[row / 16] >> (row % 16) & 1) == 0) continue;
      double value = 0;
      for (int head = 0; head < scan.query.num_heads; ++head) {
        expected_mass[head] += shares[row][head];
        value += shares[row][head] / scan.query.num_heads;
      }
      const bool is_next = next < found.size() && found[next].position == 640 + row;
      if (std::abs(value - least) > 1e-4 * least) {
        EXPECT_EQ(is_next, value >= least) << row;
      }
      if (!is_next) continue;
      EXPECT_NEAR(found[next++].value, value, 2e-5 * value) << row;
    }
    EXPECT_EQ(next, found.size());
    std::vector<double> mass(scan.query.num_heads);
    kernels().add_mass(scan.query, scan.page.data(), positions.data(), mass.data());
    for (size_t head = 0; head < mass.size(); ++head) {
      EXPECT_NEAR(mass[head], expected_mass[head], 2e-5 * expected_mass[head]);
    }
  }
  EXPECT_GT(found_in_all, 100);
  EXPECT_LT(found_in_all, 3000);
}

}  // namespace
}  // namespace heavywater
