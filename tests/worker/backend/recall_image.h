// The demoted positions of one layer as host memory, and what a backend makes of
// them: sketches, and the views that recall needs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <random>
#include <span>
#include <vector>

#include "tests/worker/backend/layer_image.h"
#include "tests/worker/backend/test_memory.h"
#include "worker/backend/backend.h"

namespace heavywater {

struct RecallImage {
  SketchShape sketch;
  int64_t num_positions = 0;
  std::vector<std::vector<std::byte>> host;  // [num_kv_heads][num_pages], empty: no copy
  std::vector<uint16_t> demoted;             // [num_sets][num_pages * page_tokens / 16]
  std::vector<float> squares;                // [num_kv_heads][kSketchQueries][head_dim]
  int64_t max_picks = 64;
  bool all = false;
  float min_share = 1e-4f;
  std::vector<uint8_t> resting;  // [num_kv_heads][num_pages], or none: those have no address

  int64_t num_pages() const {
    return (num_positions + sketch.page_tokens - 1) / sketch.page_tokens;
  }
};

// What a step reported.
struct RecallOutcome {
  std::vector<int64_t> gains;                // [num_kv_heads][num_pages * page_tokens]
  std::vector<std::vector<Position>> picks;  // [num_tokens][num_kv_heads]
  std::vector<float> missing;                // [num_tokens][num_kv_heads]
  std::vector<int64_t> missed = {};          // [num_kv_heads][num_pages], where pages rest
  std::vector<int32_t> num_missed = {};      // [num_tokens][num_kv_heads], likewise
};

// Host pages of every position of `full`, a layer whose slot i holds position i.
RecallImage RecallOf(const KvShape& shape, const LayerImage& full, int sketch_channels);

// Whether a position may be picked.
bool IsDemoted(const RecallImage& image, int set, Position position);
void SetDemoted(RecallImage& image, int set, Position position, bool demoted);

// K of one KV head: few channels with large deviations, some constant, the rest
// small. [count][head_dim]
std::vector<float> StructuredKeys(std::mt19937& rng, int64_t count, int head_dim);

// Sketches made by `backend` itself. Outlived by the image.
class DeviceRecall {
 public:
  DeviceRecall(Backend& backend, const KvShape& shape, const RecallImage& image,
               int64_t num_tokens);
  DeviceRecall(const DeviceRecall&) = delete;
  DeviceRecall& operator=(const DeviceRecall&) = delete;

  const RecallView& view() const { return view_; }
  RecallView& view() { return view_; }
  std::vector<uint8_t> Channels() const;
  std::vector<std::byte> Page(int64_t page) const;  // [num_kv_heads][page_bytes]
  RecallOutcome Read() const;
  // Spoils the host's rows that may not be picked, after the sketches were made.
  void PoisonResidents(const KvShape& shape, int num_sets);

 private:
  void LetRest(const std::vector<uint8_t>& resting, int64_t num_tokens);

  Backend* backend_;
  int num_kv_heads_;
  std::unique_ptr<TestMemory> host_;
  std::vector<std::span<std::byte>> host_pages_;  // [num_kv_heads][num_pages], empty: no copy
  std::vector<const std::byte*> table_;
  std::vector<DeviceBuffer> pages_;
  std::vector<DeviceSpan<std::byte>> page_spans_;
  DeviceBuffer channels_;
  DeviceBuffer demoted_;
  std::vector<int64_t> gains_;
  std::vector<int32_t> num_picks_;
  std::vector<Position> picks_;
  std::vector<float> missing_;
  std::vector<uint8_t> resting_;
  std::vector<int64_t> missed_;
  std::vector<int32_t> num_missed_;
  RecallView view_;
};

}  // namespace heavywater
