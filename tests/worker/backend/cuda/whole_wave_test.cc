#include "worker/backend/cuda/whole_wave.h"

#include <gtest/gtest.h>

#include <vector>

namespace heavywater::cuda {
namespace {

constexpr DeviceLimits kH100 = {
    .multiprocessors = 132, .shared_bytes = 228 * 1024, .block_shared_bytes = 227 * 1024};

WaveShape Shape(int group_size, int kv_heads) {
  return {.num_tokens = 0,
          .num_query_heads = group_size * kv_heads,
          .num_kv_heads = kv_heads,
          .head_dim = 128,
          .page_tokens = 256,
          .scale = 1};
}

std::vector<WaveToken> Wave(int tokens, int32_t used) {
  WaveToken token = {};
  token.used = used;
  token.recall = -1;
  return std::vector<WaveToken>(tokens, token);
}

TEST(WholeWaveTest, ABatchThatFillsTheDeviceIsNotSplitAndASmallOneIs) {
  EXPECT_GT(WholeWaveSharedBytes(Shape(4, 8), Wave(32, 1600), kH100), 0);
  EXPECT_EQ(WholeWaveSharedBytes(Shape(4, 8), Wave(1, 1600), kH100), 0);
  EXPECT_EQ(WholeWaveSharedBytes(Shape(4, 8), Wave(24, 1600), kH100), 0);
  // A second round that would be almost empty.
  EXPECT_EQ(WholeWaveSharedBytes(Shape(4, 8), Wave(34, 1600), kH100), 0);
  EXPECT_GT(WholeWaveSharedBytes(Shape(4, 8), Wave(66, 1600), kH100), 0);
}

TEST(WholeWaveTest, OneLongTokenAmongShortOnesIsSplit) {
  std::vector<WaveToken> wave = Wave(33, 500);
  EXPECT_GT(WholeWaveSharedBytes(Shape(4, 8), wave, kH100), 0);
  wave[7].used = 5000;
  EXPECT_EQ(WholeWaveSharedBytes(Shape(4, 8), wave, kH100), 0);
}

TEST(WholeWaveTest, TwoBlocksMustFitAMultiprocessor) {
  int64_t last = 0;
  for (int32_t used = 512; used <= 1 << 16; used += 512) {
    const int64_t bytes = WholeWaveSharedBytes(Shape(8, 8), Wave(33, used), kH100);
    if (bytes == 0) break;
    EXPECT_LE(2 * (bytes + 1024), kH100.shared_bytes);
    EXPECT_GE(bytes, 8 * used * 4);
    last = used;
  }
  EXPECT_EQ(last, 2560);
  DeviceLimits small = kH100;
  small.block_shared_bytes = 48 * 1024;
  EXPECT_EQ(WholeWaveSharedBytes(Shape(8, 8), Wave(33, 2560), small), 0);
}

TEST(WholeWaveTest, TokensWithRecallAndGroupsThatDoNotShareEachLoadAreSplit) {
  std::vector<WaveToken> wave = Wave(33, 1000);
  wave.back().recall = 0;
  EXPECT_EQ(WholeWaveSharedBytes(Shape(4, 8), wave, kH100), 0);
  EXPECT_GT(WholeWaveSharedBytes(Shape(16, 8), Wave(33, 1000), kH100), 0);
  EXPECT_EQ(WholeWaveSharedBytes(Shape(17, 8), Wave(33, 1000), kH100), 0);
  WaveShape wide = Shape(8, 8);
  wide.head_dim = 256;
  EXPECT_GT(WholeWaveSharedBytes(wide, Wave(33, 1000), kH100), 0);
  wide.num_query_heads = 9 * wide.num_kv_heads;
  EXPECT_EQ(WholeWaveSharedBytes(wide, Wave(33, 1000), kH100), 0);
}

}  // namespace
}  // namespace heavywater::cuda
