// What reads and overwrites rows waits for the copies that are under way.
#include "worker/backend/cuda/write_through.h"

#include <cstring>

#include "tests/worker/backend/cuda/slots_case.h"

namespace heavywater::cuda {
namespace {

constexpr int64_t kTokens = 5;

class WriteThroughTest : public SlotsTest {
 protected:
  // All tokens' host rows hold `value` in every channel.
  void ExpectHostRows(float value) {
    std::vector<float> expected(kTokens * shape_.num_kv_heads * shape_.head_dim * 2, value);
    std::vector<float> read(expected.size());
    std::memcpy(read.data(), host_.data(), read.size() * sizeof(float));
    EXPECT_EQ(read, expected);
  }
  void AppendAll(float value, std::byte* host) {
    SlotsTest::Append(shape_, layer_.view(), kTokens, 0, value, host, stream_);
  }
  void Synchronize() { ASSERT_TRUE(backend().Synchronize(stream_).ok()); }

  const KvShape shape_ = Shape(2, 64, KvDtype::kFloat32);
  DeviceLayer layer_{backend(), EmptyLayer(shape_, 1, kTokens)};
  TestMemory host_{backend(), static_cast<size_t>(kTokens * 2 * shape_.row_bytes()),
                   std::byte{0xee}};
  Stream stream_ = backend().NewStream().value();
};

TEST_F(WriteThroughTest, SynchronizeWaitsForTheCopies) {
  AppendAll(1, host_.data());
  EXPECT_EQ(host_.data()[0], std::byte{0xee}) << "the copy is not late: this tests nothing";
  Synchronize();
  ExpectHostRows(1);
}

TEST_F(WriteThroughTest, AnAppendToTheSameSlotsWaitsForTheCopies) {
  AppendAll(1, host_.data());
  AppendAll(2, nullptr);
  Synchronize();
  ExpectHostRows(1);
}

TEST_F(WriteThroughTest, AnAppendOnAnotherStreamWaitsForTheCopiesToo) {
  AppendAll(1, host_.data());
  Synchronize();
  AppendAll(2, host_.data());
  // Ordered behind the first stream's append by the caller.
  Stream other = backend().NewStream().value();
  cudaEvent_t event = nullptr;
  ASSERT_EQ(cudaEventCreate(&event), cudaSuccess);
  ASSERT_EQ(cudaEventRecord(event, HandleOf(stream_)), cudaSuccess);
  ASSERT_EQ(cudaStreamWaitEvent(HandleOf(other), event), cudaSuccess);
  SlotsTest::Append(shape_, layer_.view(), kTokens, 0, 3, nullptr, other);
  ASSERT_TRUE(backend().Synchronize(other).ok());
  Synchronize();
  ExpectHostRows(2);
  ASSERT_EQ(cudaEventDestroy(event), cudaSuccess);
}

TEST_F(WriteThroughTest, ZeroAndCopiesWaitForTheCopies) {
  AppendAll(1, host_.data());
  ASSERT_TRUE(backend().Zero(layer_.view().keys, stream_).ok());
  ASSERT_TRUE(backend().Zero(layer_.view().values, stream_).ok());
  Synchronize();
  ExpectHostRows(1);

  const std::vector<std::byte> rubbish(layer_.view().keys.size(), std::byte{0x55});
  AppendAll(2, host_.data());
  ASSERT_TRUE(backend().CopyToDevice(layer_.view().keys, rubbish, stream_).ok());
  Synchronize();
  ExpectHostRows(2);

  const DeviceBuffer other = Upload(backend(), rubbish);
  Stream default_stream;
  ASSERT_TRUE(backend().Synchronize(default_stream).ok());
  AppendAll(3, host_.data());
  ASSERT_TRUE(backend().CopyOnDevice(layer_.view().values, other.As<std::byte>(), stream_).ok());
  Synchronize();
  ExpectHostRows(3);
}

TEST_F(WriteThroughTest, GatheringIntoTheSlotsWaitsForTheCopies) {
  AppendAll(1, host_.data());
  const DeviceLayer empty(backend(), EmptyLayer(shape_, 1, kTokens));
  Stream default_stream;
  ASSERT_TRUE(backend().Synchronize(default_stream).ok());
  const std::vector<Position> kept = {0, 1, 2, 3, 4};
  ASSERT_TRUE(backend()
                  .GatherSlots(shape_, empty.view(), layer_.view(), kept, kTokens, {}, 0, stream_)
                  .ok());
  Synchronize();
  ExpectHostRows(1);
}

TEST_F(WriteThroughTest, PromotionReadsRowsThatWereWrittenThroughAndOverwritesNone) {
  AppendAll(1, host_.data());
  // Position 0 of both heads comes back from the rows under way, into slot 4, whose own
  // row is under way, too.
  const std::vector<const std::byte*> pages = {host_.data(), host_.data() + shape_.row_bytes()};
  const std::vector<int32_t> slots = {4};
  const std::vector<Position> positions = {0};
  const std::vector<int64_t> scores = {9};
  ASSERT_TRUE(backend()
                  .PromoteSlots(shape_, layer_.view(),
                                {.set = 0,
                                 .slots = slots,
                                 .positions = positions,
                                 .scores = scores,
                                 .host = {.pages = pages, .num_pages = 1}},
                                stream_)
                  .ok());
  Synchronize();
  ExpectHostRows(1);
  const LayerImage read = layer_.Read();
  EXPECT_EQ(StoredRow(read.keys, shape_, kTokens, 1, 4),
            Stored(std::vector<float>(64, 1), shape_.dtype));
  EXPECT_EQ(read.positions[4], 0);
  EXPECT_EQ(read.scores[4], 9);
}

}  // namespace
}  // namespace heavywater::cuda
