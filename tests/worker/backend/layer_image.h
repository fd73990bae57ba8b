// A layer of a sequence as host memory, and its copy on a device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "worker/backend/backend.h"

namespace heavywater {

struct LayerImage {
  std::vector<std::byte> keys;
  std::vector<std::byte> values;
  std::vector<Position> positions;
  std::vector<int64_t> scores;
  std::vector<int64_t> gains;
  int num_sets = 1;
  int64_t capacity = 0;
  int64_t used = 0;

  bool operator==(const LayerImage&) const = default;
};

// Zeros, all slots free.
LayerImage EmptyLayer(const KvShape& shape, int num_sets, int64_t capacity);

// Random K and V; slot i of every set holds position i.
LayerImage DenseLayer(std::mt19937& rng, const KvShape& shape, int num_sets, int64_t capacity);

// Frees about `fraction` of the slots, at random, and leaves huge K and V there.
void PunchHoles(std::mt19937& rng, const KvShape& shape, double fraction, LayerImage& layer);

// Mixes which slot holds which position, in each set.
void ShufflePositions(std::mt19937& rng, LayerImage& layer);

std::vector<float> RandomFloats(std::mt19937& rng, int64_t count, float deviation = 1);

// The KV head's K or V row in the KV dtype, as stored.
std::vector<std::byte> StoredRow(const std::vector<std::byte>& rows, const KvShape& shape,
                                 int64_t capacity, int kv_head, int64_t slot);
// `values` in the KV dtype.
std::vector<std::byte> Stored(std::span<const float> values, KvDtype dtype);

template <typename T>
DeviceBuffer Upload(Backend& backend, const std::vector<T>& from) {
  DeviceBuffer buffer = backend.Allocate(from.size() * sizeof(T)).value();
  Stream stream;
  const auto bytes = std::as_bytes(std::span(from));
  HW_CHECK(backend.CopyToDevice(buffer.As<std::byte>(), bytes, stream).ok());
  return buffer;
}

template <typename T>
std::vector<T> Download(Backend& backend, const DeviceBuffer& buffer) {
  std::vector<T> to(buffer.bytes() / sizeof(T));
  Stream stream;
  const auto bytes = std::as_writable_bytes(std::span(to));
  HW_CHECK(backend.CopyToHost(bytes, buffer.As<std::byte>(), stream).ok());
  HW_CHECK(backend.Synchronize(stream).ok());
  return to;
}

class DeviceLayer {
 public:
  DeviceLayer(Backend& backend, const LayerImage& image);
  const LayerView& view() const { return view_; }
  LayerImage Read() const;

 private:
  Backend* backend_;
  DeviceBuffer keys_;
  DeviceBuffer values_;
  DeviceBuffer positions_;
  DeviceBuffer scores_;
  DeviceBuffer gains_;
  LayerView view_;
};

}  // namespace heavywater
