#include "worker/backend/cuda/wave_scratch.h"

#include <vector>

#include "gtest/gtest.h"
#include "worker/backend/cuda/scratch_bytes.h"

namespace heavywater {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

KvShape Llama() {
  KvShape shape;
  shape.num_query_heads = 32;
  shape.num_kv_heads = 8;
  shape.head_dim = 128;
  return shape;
}

TEST(WaveScratchTest, NeverShrinksWithMoreOfAnything) {
  int64_t before = 0;
  for (int64_t capacity = 0; capacity <= 200000; capacity += 97) {
    const int64_t bytes = CudaAttendScratchBytes(Llama(), capacity, {});
    ASSERT_GE(bytes, before) << capacity;
    before = bytes;
    const RecallLimits few{.max_picks = 64};
    const RecallLimits more{.max_picks = 64, .all_positions = 4096};
    ASSERT_LE(bytes, CudaAttendScratchBytes(Llama(), capacity, few));
    ASSERT_LE(CudaAttendScratchBytes(Llama(), capacity, few),
              CudaAttendScratchBytes(Llama(), capacity, more));
  }
}

TEST(WaveScratchTest, IsBoundedUntilOneTokenNeedsMore) {
  EXPECT_LE(CudaAttendScratchBytes(Llama(), 8192, {}), 32 * kMiB);
  EXPECT_EQ(CudaAttendScratchBytes(Llama(), 100000, {}), 32 * kMiB);
  // Weights of a million slots for 32 query heads.
  EXPECT_GT(CudaAttendScratchBytes(Llama(), 1 << 20, {}), 128 * kMiB);
}

TEST(WaveScratchTest, WavesHaveAsManyTokensAsFitAndFewerForLongContexts) {
  int64_t before = 128;
  for (const int64_t capacity : {512, 4096, 32768, 262144, 1 << 20}) {
    const cuda::WaveNeeds needs = cuda::NeedsOf(capacity, {});
    const int64_t bytes = CudaAttendScratchBytes(Llama(), capacity, {});
    const int64_t tokens = cuda::WaveTokens(Llama(), needs, bytes);
    EXPECT_GE(tokens, 1) << capacity;
    EXPECT_LE(tokens, before) << capacity;
    before = tokens;
    std::vector<std::byte> memory(bytes);
    const cuda::WaveScratch scratch = cuda::CutWaveScratch(Llama(), needs, tokens, memory.data());
    const auto* end = reinterpret_cast<const std::byte*>(scratch.totals + tokens * 32);
    EXPECT_LE(end, memory.data() + bytes) << capacity;
  }
  EXPECT_EQ(before, 1);
}

TEST(WaveScratchTest, TooLittleMemoryHoldsNoToken) {
  const cuda::WaveNeeds needs = cuda::NeedsOf(4096, {});
  EXPECT_EQ(cuda::WaveTokens(Llama(), needs, 1000), 0);
}

TEST(WaveScratchTest, TotalsOfAPromptAreThoseOfOnePiece) {
  EXPECT_EQ(CudaPromptScratchBytes(Llama(), 100), 100 * 32 * 16);
  EXPECT_EQ(CudaPromptScratchBytes(Llama(), 1 << 20), 4096 * 32 * 16);
}

}  // namespace
}  // namespace heavywater
