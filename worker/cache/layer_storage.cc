#include "worker/cache/layer_storage.h"

#include <algorithm>
#include <utility>

#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"

namespace heavywater {
namespace {

// Copies slots between the views of two storages of one sequence.
class SlotCopier {
 public:
  SlotCopier(const KvShape& shape, const LayerView& from, const LayerView& to, Backend& backend,
             Stream& stream)
      : shape_(shape), from_(from), to_(to), backend_(backend), stream_(stream) {}

  // `count` slots of every set from slot `from_slot` to `to_slot`.
  absl::Status Copy(int64_t from_slot, int64_t to_slot, int64_t count) {
    for (int head = 0; head < shape_.num_kv_heads; ++head) {
      HW_RETURN_IF_ERROR(CopyHead(head, from_slot, to_slot, count));
    }
    for (int set = 0; set < from_.num_sets; ++set) {
      HW_RETURN_IF_ERROR(CopySet(set, from_slot, to_slot, count));
    }
    return absl::OkStatus();
  }

  // One slot of one set, with the KV heads that share it.
  absl::Status Move(int set, const SlotTable::Move& move) {
    HW_RETURN_IF_ERROR(CopySet(set, move.from, move.to, 1));
    if (from_.num_sets > 1) return CopyHead(set, move.from, move.to, 1);
    for (int head = 0; head < shape_.num_kv_heads; ++head) {
      HW_RETURN_IF_ERROR(CopyHead(head, move.from, move.to, 1));
    }
    return absl::OkStatus();
  }

 private:
  template <typename T>
  absl::Status CopyRows(DeviceSpan<T> from, DeviceSpan<T> to, int row, int64_t width,
                        int64_t from_slot, int64_t to_slot, int64_t count) {
    const DeviceSpan<T> source =
        from.Sub((row * from_.capacity + from_slot) * width, count * width);
    const DeviceSpan<T> target = to.Sub((row * to_.capacity + to_slot) * width, count * width);
    return backend_.CopyOnDevice(DeviceBytes(target), DeviceBytes(source), stream_);
  }
  absl::Status CopyHead(int head, int64_t from_slot, int64_t to_slot, int64_t count) {
    const int64_t row = int64_t{shape_.head_dim} * ElementBytes(shape_.dtype);
    HW_RETURN_IF_ERROR(CopyRows(from_.keys, to_.keys, head, row, from_slot, to_slot, count));
    HW_RETURN_IF_ERROR(CopyRows(from_.values, to_.values, head, row, from_slot, to_slot, count));
    return CopyRows(from_.gains, to_.gains, head, 1, from_slot, to_slot, count);
  }
  absl::Status CopySet(int set, int64_t from_slot, int64_t to_slot, int64_t count) {
    HW_RETURN_IF_ERROR(CopyRows(from_.scores, to_.scores, set, 1, from_slot, to_slot, count));
    return CopyRows(from_.positions, to_.positions, set, 1, from_slot, to_slot, count);
  }

  const KvShape& shape_;
  const LayerView from_;
  const LayerView to_;
  Backend& backend_;
  Stream& stream_;
};

// All positions free: the backend's zeroed memory would mean position 0.
absl::Status MarkFree(DeviceSpan<Position> positions, Backend& backend, Stream& stream) {
  const std::vector<Position> free(positions.size(), kNoPosition);
  return backend.CopyToDevice(DeviceBytes(positions), std::as_bytes(std::span(free)), stream);
}

}  // namespace

absl::StatusOr<LayerStorage> LayerStorage::Allocate(const KvShape& shape, int num_sets,
                                                    int64_t capacity, DeviceMemory& memory,
                                                    Stream& stream, bool whole_prompt) {
  const auto kind = [whole_prompt](MemoryKind kind) {
    return whole_prompt ? MemoryKind::kPromptKv : kind;
  };
  const LayerBytes bytes = DeviceLayerBytes(shape, num_sets, capacity);
  LayerStorage storage;
  storage.capacity_ = capacity;
  HW_ASSIGN_OR_RETURN(storage.slots_, memory.Allocate(kind(MemoryKind::kSlots), bytes.slots));
  HW_ASSIGN_OR_RETURN(storage.scores_, memory.Allocate(kind(MemoryKind::kScores), bytes.scores));
  HW_ASSIGN_OR_RETURN(storage.positions_, memory.Allocate(kind(MemoryKind::kTables), bytes.tables));
  storage.tables_.assign(num_sets, SlotTable(capacity));
  HW_RETURN_IF_ERROR(MarkFree(storage.positions_.As<Position>(), memory.backend(), stream));
  return storage;
}

absl::StatusOr<LayerStorage> LayerStorage::Create(const KvShape& shape, int num_sets,
                                                  int64_t capacity, DeviceMemory& memory,
                                                  Stream& stream) {
  return Allocate(shape, num_sets, capacity, memory, stream, /*whole_prompt=*/false);
}

absl::StatusOr<LayerStorage> LayerStorage::CreateWhole(const KvShape& shape, int num_sets,
                                                       int64_t num_tokens, DeviceMemory& memory,
                                                       Stream& stream) {
  return Allocate(shape, num_sets, num_tokens, memory, stream, /*whole_prompt=*/true);
}

LayerView LayerStorage::View(const KvShape& shape) const {
  const int64_t kv_bytes = slots_.bytes() / 2;
  LayerView view;
  view.keys = slots_.As<std::byte>(0, kv_bytes);
  view.values = slots_.As<std::byte>(kv_bytes, kv_bytes);
  view.positions = positions_.As<Position>();
  view.scores = scores_.As<int64_t>(0, num_sets() * capacity_);
  view.gains = scores_.As<int64_t>(num_sets() * capacity_ * int64_t{sizeof(int64_t)},
                                   shape.num_kv_heads * capacity_);
  view.num_sets = num_sets();
  view.capacity = capacity_;
  view.used = used();
  return view;
}

absl::StatusOr<LayerStorage> LayerStorage::CopyOf(const KvShape& shape, const LayerStorage& from,
                                                  DeviceMemory& memory, Stream& stream) {
  HW_ASSIGN_OR_RETURN(LayerStorage copy,
                      Create(shape, from.num_sets(), from.capacity(), memory, stream));
  SlotCopier copier(shape, from.View(shape), copy.View(shape), memory.backend(), stream);
  HW_RETURN_IF_ERROR(copier.Copy(0, 0, from.used()));
  copy.tables_ = from.tables_;
  return copy;
}

absl::Status LayerStorage::Grow(const KvShape& shape, int64_t capacity, DeviceMemory& memory,
                                Stream& stream) {
  HW_ASSIGN_OR_RETURN(LayerStorage larger, Create(shape, num_sets(), capacity, memory, stream));
  SlotCopier copier(shape, View(shape), larger.View(shape), memory.backend(), stream);
  HW_RETURN_IF_ERROR(copier.Copy(0, 0, used()));
  HW_RETURN_IF_ERROR(memory.backend().Synchronize(stream));
  larger.tables_ = std::move(tables_);
  for (SlotTable& table : larger.tables_) table.Grow(capacity);
  *this = std::move(larger);
  return absl::OkStatus();
}

absl::Status LayerStorage::Shrink(const KvShape& shape, int64_t capacity, DeviceMemory& memory,
                                  Stream& stream) {
  HW_ASSIGN_OR_RETURN(LayerStorage smaller, Create(shape, num_sets(), capacity, memory, stream));
  SlotCopier copier(shape, View(shape), smaller.View(shape), memory.backend(), stream);
  HW_RETURN_IF_ERROR(copier.Copy(0, 0, std::min(used(), capacity)));
  smaller.tables_ = tables_;
  for (int set = 0; set < num_sets(); ++set) {
    for (const SlotTable::Move& move : smaller.tables_[set].Shrink(capacity)) {
      HW_RETURN_IF_ERROR(copier.Move(set, move));
    }
  }
  HW_RETURN_IF_ERROR(memory.backend().Synchronize(stream));
  *this = std::move(smaller);
  return absl::OkStatus();
}

}  // namespace heavywater
