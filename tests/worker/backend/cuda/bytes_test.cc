// What the kernels move, counted by the shim, against what they must.
#include <numeric>

#include "tests/worker/backend/cuda/slots_case.h"

namespace heavywater::cuda {
namespace {

class BytesTest : public SlotsTest {
 protected:
  // Bytes since the last call; launches must have come to their end.
  cuda_shim::Counters Take(Stream& stream) {
    EXPECT_TRUE(backend().Synchronize(stream).ok());
    const cuda_shim::Counters counters = cuda_shim::ReadCounters();
    cuda_shim::ResetCounters();
    return counters;
  }
  // No less, and at most a tenth more.
  static void ExpectAbout(int64_t bytes, int64_t necessary) {
    EXPECT_GE(bytes, necessary);
    EXPECT_LE(bytes, necessary + necessary / 10);
  }
};

TEST_F(BytesTest, AppendReadsNewRowsOnceAndWritesSlotsAndHostRowsOnce) {
  for (const KvDtype dtype : kKvDtypes) {
    const KvShape shape = Shape(8, 128, dtype);
    constexpr int64_t kTokens = 64;
    const DeviceLayer layer(backend(), EmptyLayer(shape, 1, kTokens));
    const int64_t row_bytes = kTokens * shape.num_kv_heads * shape.row_bytes();
    TestMemory host(backend(), row_bytes);
    Stream stream;
    Take(stream);
    Append(shape, layer.view(), kTokens, 0, 1, host.data(), stream);
    const cuda_shim::Counters moved = Take(stream);
    const int64_t lists = kTokens * (4 + 8 * shape.num_kv_heads);
    // fp32 from the caller; from the slots on to the host.
    ExpectAbout(moved.loaded,
                kTokens * shape.num_kv_heads * shape.head_dim * 2 * 4 + row_bytes + lists);
    ExpectAbout(moved.stored, row_bytes + kTokens * (4 + 8 + 8 * shape.num_kv_heads));
    EXPECT_EQ(moved.host_stored, row_bytes);
    EXPECT_EQ(moved.host_loaded, 0);
  }
}

TEST_F(BytesTest, TheLedgerIsReadAndWrittenOnce) {
  const KvShape shape = Shape(8, 64, KvDtype::kBFloat16);
  constexpr int64_t kSlots = 3000;
  const DeviceLayer layer(backend(), EmptyLayer(shape, 1, kSlots));
  const DeviceBuffer sums = backend().Allocate(8 * kSlots).value();
  const DeviceBuffer pooled = backend().Allocate(8 * kSlots).value();
  const DeviceBuffer total = backend().Allocate(8).value();
  Stream stream;
  Take(stream);
  ASSERT_TRUE(backend().CollectGains(shape, layer.view(), sums.As<int64_t>(), stream).ok());
  cuda_shim::Counters moved = Take(stream);
  ExpectAbout(moved.loaded, 8 * 8 * kSlots);
  ExpectAbout(moved.stored, 9 * 8 * kSlots);
  ASSERT_TRUE(backend().AddScores(layer.view(), sums.As<int64_t>(), 0.9, stream).ok());
  moved = Take(stream);
  ExpectAbout(moved.loaded, 2 * 8 * kSlots);
  ExpectAbout(moved.stored, 8 * kSlots);
  ASSERT_TRUE(backend().SumRows(sums.As<int64_t>(), total.As<int64_t>(), 1, kSlots, stream).ok());
  ExpectAbout(Take(stream).loaded, 8 * kSlots);
  ASSERT_TRUE(backend()
                  .PoolVotes(sums.As<int64_t>(), pooled.As<int64_t>(), 1, kSlots, Pooling::kAverage,
                             7, stream)
                  .ok());
  moved = Take(stream);
  ExpectAbout(moved.loaded, 8 * kSlots);
  ExpectAbout(moved.stored, 8 * kSlots);
}

TEST_F(BytesTest, AGatherMovesTheKeptRowsOnly) {
  const KvShape shape = Shape(4, 128, KvDtype::kBFloat16);
  const DeviceLayer from(backend(), EmptyLayer(shape, 1, 1000));
  const DeviceLayer to(backend(), EmptyLayer(shape, 1, 200));
  std::vector<Position> kept(200);
  std::iota(kept.begin(), kept.end(), 300);
  for (const bool in_place : {false, true}) {
    const int64_t capacity = in_place ? 1000 : 200;
    Stream stream;
    Take(stream);
    ASSERT_TRUE(backend()
                    .GatherSlots(shape, from.view(), in_place ? from.view() : to.view(), kept, 200,
                                 {}, 0, stream)
                    .ok());
    const cuda_shim::Counters moved = Take(stream);
    const int64_t rows = 200 * shape.num_kv_heads * shape.row_bytes();
    ExpectAbout(moved.loaded, rows + 200 * 4);
    ExpectAbout(moved.stored, rows + capacity * (4 + 8 + 8 * shape.num_kv_heads));
  }
}

}  // namespace
}  // namespace heavywater::cuda
