#include "worker/cache/layer_storage.h"

#include <map>
#include <vector>

#include "gtest/gtest.h"
#include "worker/cache/device_bytes.h"

namespace heavywater {
namespace {

KvShape Shape() {
  KvShape shape;
  shape.num_layers = 1;
  shape.num_query_heads = 4;
  shape.num_kv_heads = 2;
  shape.total_kv_heads = 2;
  shape.total_query_heads = 4;
  shape.head_dim = 8;
  shape.dtype = KvDtype::kFloat32;
  return shape;
}

class LayerStorageTest : public ::testing::TestWithParam<int> {
 protected:
  int num_sets() const { return GetParam(); }

  LayerStorage Create(int64_t capacity) {
    return *LayerStorage::Create(shape_, num_sets(), capacity, memory_, stream_);
  }

  // K of a position is the position itself in every element, V its negative.
  void Append(LayerStorage& storage, Position position) {
    std::vector<int32_t> slots;
    for (int set = 0; set < num_sets(); ++set) storage.table(set).Append(position, 1, slots);
    std::vector<float> k(2 * 8, static_cast<float>(position));
    std::vector<float> v(2 * 8, static_cast<float>(-position));
    AppendItem item;
    item.layer = storage.View(shape_);
    item.num_tokens = 1;
    item.first_position = position;
    item.slots = slots;
    AppendParams params;
    params.items = std::span(&item, 1);
    params.keys = DeviceSpan<const float>(k.data(), 16);
    params.values = DeviceSpan<const float>(v.data(), 16);
    ASSERT_TRUE(backend_->Append(shape_, params, stream_).ok());
  }

  void Release(LayerStorage& storage, int set, std::vector<int32_t> slots) {
    ASSERT_TRUE(backend_->ReleaseSlots(shape_, storage.View(shape_), set, slots, stream_).ok());
    storage.table(set).Release(slots);
  }

  template <typename T>
  std::vector<T> Read(DeviceSpan<T> span) {
    std::vector<T> host(span.size());
    EXPECT_TRUE(
        backend_->CopyToHost(std::as_writable_bytes(std::span(host)), DeviceBytes(span), stream_)
            .ok());
    return host;
  }

  // The device's tables agree with their mirror, and every resident row is its
  // position's.
  void CheckContents(const LayerStorage& storage) {
    const LayerView view = storage.View(shape_);
    const std::vector<Position> positions = Read(view.positions);
    const std::vector<std::byte> keys = Read(view.keys);
    const std::vector<std::byte> values = Read(view.values);
    for (int head = 0; head < 2; ++head) {
      const int set = num_sets() == 1 ? 0 : head;
      for (int64_t slot = 0; slot < view.capacity; ++slot) {
        const Position position = positions[set * view.capacity + slot];
        const std::span<const Position> mirror = storage.table(set).positions();
        EXPECT_EQ(position, slot < view.used ? mirror[slot] : kNoPosition);
        if (position == kNoPosition) continue;
        const int64_t row = (head * view.capacity + slot) * 8;
        EXPECT_EQ(reinterpret_cast<const float*>(keys.data())[row + 7], position);
        EXPECT_EQ(reinterpret_cast<const float*>(values.data())[row], -position);
      }
    }
  }

  const KvShape shape_ = Shape();
  std::unique_ptr<Backend> backend_ = CreateReferenceBackend();
  Stream stream_;
  DeviceMemory memory_{*backend_, 0};
  DeviceMemory::Reservation reservation_ = *memory_.Reserve(1 << 20, "test");
};

TEST_P(LayerStorageTest, NewStorageHasOnlyFreeSlotsAndTheBytesOfItsLayout) {
  const LayerStorage storage = Create(6);
  EXPECT_EQ(storage.bytes(), DeviceLayerBytes(shape_, num_sets(), 6).total());
  EXPECT_EQ(memory_.kv_gauge().current_bytes, storage.bytes());
  for (Position position : Read(storage.View(shape_).positions)) EXPECT_EQ(position, kNoPosition);
}

TEST_P(LayerStorageTest, GrowingKeepsEverySlot) {
  LayerStorage storage = Create(4);
  for (Position p = 1; p <= 4; ++p) Append(storage, p);
  ASSERT_TRUE(storage.Grow(shape_, 7, memory_, stream_).ok());
  EXPECT_EQ(storage.capacity(), 7);
  EXPECT_EQ(memory_.kv_gauge().current_bytes, storage.bytes());
  for (Position p = 5; p <= 7; ++p) Append(storage, p);
  CheckContents(storage);
}

TEST_P(LayerStorageTest, ShrinkingMovesWhatLiesAboveIntoFreeSlots) {
  LayerStorage storage = Create(8);
  for (Position p = 1; p <= 8; ++p) Append(storage, p);
  for (int set = 0; set < num_sets(); ++set) Release(storage, set, {set, 2, 3, 6});
  ASSERT_TRUE(storage.Shrink(shape_, 4, memory_, stream_).ok());
  EXPECT_EQ(storage.capacity(), 4);
  EXPECT_EQ(storage.resident(), 4);
  EXPECT_EQ(memory_.kv_gauge().current_bytes, storage.bytes());
  CheckContents(storage);
}

TEST_P(LayerStorageTest, AWholePromptCountsAsSuch) {
  const LayerStorage whole = *LayerStorage::CreateWhole(shape_, num_sets(), 9, memory_, stream_);
  EXPECT_EQ(memory_.gauge(MemoryKind::kPromptKv).current_bytes, whole.bytes());
  EXPECT_EQ(memory_.gauge(MemoryKind::kSlots).current_bytes, 0);
}

INSTANTIATE_TEST_SUITE_P(Sets, LayerStorageTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace heavywater
