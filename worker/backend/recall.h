// What recall asks of a backend: sketches of keys that left the device, and
// attention that picks among them and reads the picks where they lie, in host
// memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <span>

#include "cache_service/base/ids.h"
#include "worker/backend/device_buffer.h"
#include "worker/cache/sketch_shape.h"

namespace heavywater {

// Host pages of one layer of one sequence: [num_kv_heads][num_pages] addresses
// of pages, each [page_tokens] rows of K and then V in the KV dtype. Null: that
// page has no copy. On a GPU the memory is registered, so that kernels read it.
struct HostPageTable {
  std::span<const std::byte* const> pages;
  int64_t num_pages = 0;

  const std::byte* Page(int kv_head, int64_t page) const {
    return pages[kv_head * num_pages + page];
  }
};

// Recall in one layer of one sequence. Spans named "host memory" are written by
// the device as the stream runs: valid after Synchronize().
struct RecallView {
  SketchShape sketch;
  HostPageTable host;                            // of the first num_pages pages
  std::span<const DeviceSpan<std::byte>> pages;  // sketches, [num_pages] of
                                                 // [num_kv_heads][sketch.page_bytes()]
  DeviceSpan<const uint8_t> channels;            // [num_kv_heads][sketch.channels], ascending
  // Bit i of word w of a set: position 16 w + i may be picked (it is demoted,
  // has a copy and is in the sketch). [num_sets][num_pages * page_tokens / 16]
  DeviceSpan<const uint16_t> demoted;
  int64_t num_pages = 0;

  int64_t max_picks = 64;   // of a query and KV head; all: every demoted position
  bool all = false;         // no scan and no threshold
  float min_share = 1e-4f;  // of attention, by estimate, below which nothing is picked

  // Pages that rest, 1: they have no address in `host`, but are scanned like the others; picks
  // that fall on them are taken out before anything is read (not in mode `all`, which knows no
  // resting pages). Host memory, [num_kv_heads][num_pages], or empty: none rests. Only where
  // Backend::CanRest().
  std::span<const uint8_t> resting = {};
  // With `resting`: what each such page would have received, by estimate, is added here: of a
  // pick v / (1 + v), v its value, 2^-32 fixed point. Host memory, [num_kv_heads][num_pages].
  std::span<int64_t> missed = {};
  // With `resting`, or empty: how many picks were taken out. Host memory,
  // [num_tokens][num_kv_heads] of the item.
  std::span<int32_t> num_missed = {};

  // Exact probabilities of the picks, summed over the group's query heads and
  // the item's tokens, each rounded to 2^-32 on its own, are added here. Host
  // memory, [num_kv_heads][gains_stride] by position; empty: not wanted.
  std::span<int64_t> gains;
  int64_t gains_stride = 0;
  // Host memory, [num_tokens][num_kv_heads] of the item, or empty: how many were
  // picked and read.
  std::span<int32_t> num_picks;
  // Host memory, [num_tokens][num_kv_heads][max_picks], ascending, or empty: which; of
  // mode `all` the first max_picks.
  std::span<Position> picks;
  // Host memory, [num_tokens][num_kv_heads], or empty: the share of attention that
  // demoted positions which were not picked would have had, mean over the group's
  // query heads: U / (P + U), U their estimated mass, P the exact mass of slots and
  // picks. Costs a second, slower scan.
  std::span<float> missing;
};

inline bool Rests(const RecallView& recall, int kv_head, int64_t page) {
  return !recall.resting.empty() && recall.resting[kv_head * recall.num_pages + page] != 0;
}
// Whether positions of a page may be picked: it has a copy, or rests.
inline bool MayPick(const RecallView& recall, int kv_head, int64_t page) {
  return recall.host.Page(kv_head, page) != nullptr || Rests(recall, kv_head, page);
}
// A pick of that value has fallen on a page that rests. From any thread.
inline void AddMissed(const RecallView& recall, int kv_head, int64_t page, double value) {
  const double share = value / (1 + value);
  std::atomic_ref<int64_t>(recall.missed[kv_head * recall.num_pages + page])
      .fetch_add(static_cast<int64_t>(share * 4294967296.0), std::memory_order_relaxed);
}

// How much recall a step may do: what Backend::AttendScratchBytes() counts. All 0:
// none.
struct RecallLimits {
  int64_t max_picks = 0;      // of a query and KV head; at least 1 with recall
  int64_t all_positions = 0;  // in mode `all`: of a sequence

  bool any() const { return max_picks > 0 || all_positions > 0; }
  // Of a batch: enough for either.
  void Raise(const RecallLimits& other) {
    max_picks = std::max(max_picks, other.max_picks);
    all_positions = std::max(all_positions, other.all_positions);
  }
};
inline RecallLimits LimitsOf(const RecallView& recall) {
  if (recall.all) return {.all_positions = recall.num_pages * recall.sketch.page_tokens};
  return {.max_picks = std::max<int64_t>(recall.max_picks, 1)};
}

// Squares of a chunk's queries, for the choice of channels: only the last
// kSketchQueries tokens count. squares[h][position % kSketchQueries][c] = sum over
// the query heads of KV head h of q_c^2.
struct ObserveQueriesParams {
  DeviceSpan<const float> queries;  // [num_tokens][num_query_heads][head_dim], rotated
  int64_t num_tokens = 0;
  Position first_position = 0;
  DeviceSpan<float> squares;  // [num_kv_heads][kSketchQueries][head_dim]
};

// Per KV head the channels with the largest (mean over the last num_queries of q_c^2, or 1
// without any) x (variance of k_c over positions [0, num_positions) that have a copy), ties
// to the lower channel; written in ascending order.
struct ChooseChannelsParams {
  SketchShape sketch;
  HostPageTable host;
  int64_t num_positions = 0;
  DeviceSpan<const float> squares;  // [num_kv_heads][kSketchQueries][head_dim]
  int64_t num_queries = 0;          // entries 0 .. num_queries - 1 are filled
  DeviceSpan<uint8_t> channels;     // [num_kv_heads][sketch.channels]
};

// Codes pages [first_page, end_page) from their host copies, positions below
// num_positions; pages without a copy are left as they are.
struct EncodePagesParams {
  SketchShape sketch;
  HostPageTable host;
  DeviceSpan<const uint8_t> channels;            // [num_kv_heads][sketch.channels]
  std::span<const DeviceSpan<std::byte>> pages;  // [num_pages]
  int64_t first_page = 0;
  int64_t end_page = 0;
  int64_t num_positions = 0;
};

// Positions that come back into slots of one set: K and V from their host copies,
// scores as given, gains 0. DATA_LOSS when one has no copy; its slot's tables are
// then as they were.
struct PromoteParams {
  int set = 0;
  std::span<const int32_t> slots;       // host memory, as are the next two
  std::span<const Position> positions;  // [slots.size()]
  std::span<const int64_t> scores;      // [slots.size()]
  HostPageTable host;
};

}  // namespace heavywater
