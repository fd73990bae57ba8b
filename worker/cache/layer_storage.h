// Device memory of one layer of one sequence, and the mirror of its tables.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"
#include "worker/cache/device_memory.h"
#include "worker/cache/kv_layout.h"
#include "worker/cache/slot_table.h"

namespace heavywater {

// Keys and values, scores and tables: three buffers, counted by kind. Move only.
class LayerStorage {
 public:
  LayerStorage() = default;
  // Within what the caller has reserved (DeviceLayerBytes).
  static absl::StatusOr<LayerStorage> Create(const KvShape& shape, int num_sets, int64_t capacity,
                                             DeviceMemory& memory, Stream& stream);
  // As the whole KV of a prompt's layer: counted as kPromptKv.
  static absl::StatusOr<LayerStorage> CreateWhole(const KvShape& shape, int num_sets,
                                                  int64_t num_tokens, DeviceMemory& memory,
                                                  Stream& stream);
  // Within what the caller has reserved: everything in its slot. `from` is not being written.
  static absl::StatusOr<LayerStorage> CopyOf(const KvShape& shape, const LayerStorage& from,
                                             DeviceMemory& memory, Stream& stream);

  int num_sets() const { return static_cast<int>(tables_.size()); }
  int64_t capacity() const { return capacity_; }
  int64_t bytes() const { return slots_.bytes() + scores_.bytes() + positions_.bytes(); }
  SlotTable& table(int set) { return tables_[set]; }
  const SlotTable& table(int set) const { return tables_[set]; }
  // Of every set: they are filled and emptied by the same counts.
  int64_t used() const { return tables_[0].used(); }
  int64_t resident() const { return tables_[0].resident(); }
  LayerView View(const KvShape& shape) const;
  // All that it holds but positions: slots; scores and gains.
  std::array<DeviceSpan<std::byte>, 2> contents() const {
    return {slots_.As<std::byte>(), scores_.As<std::byte>()};
  }

  // To `capacity` slots per set, in new buffers; the old ones live until the
  // copy is done. Everything keeps its slot.
  absl::Status Grow(const KvShape& shape, int64_t capacity, DeviceMemory& memory, Stream& stream);
  // To fewer: positions in slots that go move to the lowest free ones.
  absl::Status Shrink(const KvShape& shape, int64_t capacity, DeviceMemory& memory, Stream& stream);

 private:
  static absl::StatusOr<LayerStorage> Allocate(const KvShape& shape, int num_sets, int64_t capacity,
                                               DeviceMemory& memory, Stream& stream,
                                               bool whole_prompt);

  int64_t capacity_ = 0;
  DeviceBuffer slots_;   // keys, then values
  DeviceBuffer scores_;  // scores of the sets, then gains of the KV heads
  DeviceBuffer positions_;
  std::vector<SlotTable> tables_;  // [num_sets]
};

}  // namespace heavywater
