#include "worker/backend/host_memory.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/host_buffer.h"
#include "worker/backend/pooling.h"
#include "worker/backend/sketch.h"
#include "worker/cache/kv_element.h"

namespace heavywater {
namespace {

// One KV head's row of one new token: into its slot, and the stored bytes on to
// the host page.
void AppendRow(const KvShape& shape, const AppendParams& params, const AppendItem& item,
               int kv_head, int64_t token) {
  const int64_t row = (item.first_token + token) * shape.num_kv_heads + kv_head;
  const int32_t slot = item.slots[SetOfKvHead(item.layer, kv_head) * item.num_tokens + token];
  HW_CHECK(slot >= 0 && slot < item.layer.capacity);
  const KvHeadRows rows = RowsOfKvHead(shape, item.layer, kv_head);
  const auto vector = [&](DeviceSpan<const float> all) {
    return std::span(all.device_address() + row * shape.head_dim,
                     static_cast<size_t>(shape.head_dim));
  };
  StoreKvRow(shape.dtype, vector(params.keys), rows.Key(slot));
  StoreKvRow(shape.dtype, vector(params.values), rows.Value(slot));
  item.layer.gains.device_address()[kv_head * item.layer.capacity + slot] = 0;
  if (params.host_rows.empty()) return;
  std::byte* host = params.host_rows[row].row;
  if (host == nullptr) return;
  std::memcpy(host, rows.Key(slot), rows.row_bytes);
  std::memcpy(host + rows.row_bytes, rows.Value(slot), rows.row_bytes);
}

void AppendTables(const AppendItem& item) {
  for (int set = 0; set < item.layer.num_sets; ++set) {
    const int64_t first = set * item.layer.capacity;
    for (int64_t token = 0; token < item.num_tokens; ++token) {
      const int64_t slot = first + item.slots[set * item.num_tokens + token];
      item.layer.positions.device_address()[slot] =
          static_cast<Position>(item.first_position + token);
      item.layer.scores.device_address()[slot] = 0;
    }
  }
}

int64_t SumOfRow(std::span<const int64_t> row) {
  int64_t sum = 0;
  for (const int64_t value : row) {
    if (value < 0) return -1;
    if (__builtin_add_overflow(sum, value, &sum)) sum = std::numeric_limits<int64_t>::max();
  }
  return sum;
}

absl::Status CollectVictimsOfSet(const VictimsParams& params, int set) {
  const Position* positions = params.positions.device_address() + set * params.stride;
  const int64_t* scores = params.scores.device_address() + set * params.stride;
  const uint8_t* kept = params.kept.device_address() + set * params.kept_stride;
  int32_t* victims = params.victims.device_address() + set * params.max_victims;
  int64_t* victim_scores = params.victim_scores.device_address() + set * params.max_victims;
  std::fill_n(victims, params.max_victims, -1);
  std::fill_n(victim_scores, params.max_victims, 0);
  int64_t count = 0;
  for (int64_t slot = 0; slot < params.used; ++slot) {
    if (positions[slot] == kNoPosition || kept[slot] != 0) continue;
    if (count == params.max_victims) {
      return absl::FailedPreconditionError(absl::StrCat(
          "set ", set, " gives up more than max_victims, which is ", params.max_victims));
    }
    victims[count] = static_cast<int32_t>(slot);
    victim_scores[count++] = scores[slot];
  }
  return absl::OkStatus();
}

// One KV head's rows of positions that come back.
absl::Status PromoteRows(const KvShape& shape, const LayerView& layer, const PromoteParams& params,
                         int kv_head) {
  const KvHeadRows rows = RowsOfKvHead(shape, layer, kv_head);
  for (size_t i = 0; i < params.slots.size(); ++i) {
    const int32_t slot = params.slots[i];
    HW_CHECK(slot >= 0 && slot < layer.capacity);
    const Position position = params.positions[i];
    const std::byte* page = params.host.Page(kv_head, position / shape.page_tokens);
    if (page == nullptr) {
      return absl::DataLossError(absl::StrCat("position ", position, " of KV head ", kv_head,
                                              " is promoted, but has no host copy"));
    }
    const std::byte* row = page + int64_t{position % shape.page_tokens} * shape.row_bytes();
    std::memcpy(rows.Key(slot), row, rows.row_bytes);
    std::memcpy(rows.Value(slot), row + rows.row_bytes, rows.row_bytes);
    layer.gains.device_address()[kv_head * layer.capacity + slot] = 0;
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckBackendShape(const KvShape& shape) {
  if (shape.head_dim <= 0 || shape.head_dim % 8 != 0 || shape.head_dim > kMaxKvHeadDim) {
    return absl::InvalidArgumentError(absl::StrCat("head_dim is ", shape.head_dim,
                                                   ", want a positive multiple of 8, at most ",
                                                   kMaxKvHeadDim));
  }
  if (shape.num_kv_heads <= 0 || shape.num_query_heads % shape.num_kv_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("num_query_heads is ", shape.num_query_heads,
                                                   ", want a multiple of num_kv_heads, which is ",
                                                   shape.num_kv_heads));
  }
  return absl::OkStatus();
}

KvHeadRows RowsOfKvHead(const KvShape& shape, const LayerView& layer, int kv_head) {
  const int64_t row_bytes = int64_t{shape.head_dim} * ElementBytes(shape.dtype);
  const int64_t offset = kv_head * layer.capacity * row_bytes;
  return {.keys = layer.keys.device_address() + offset,
          .values = layer.values.device_address() + offset,
          .row_bytes = row_bytes};
}

absl::Status HostMemoryBackend::CheckShape(const KvShape& shape) const {
  return CheckBackendShape(shape);
}

absl::StatusOr<DeviceBuffer> HostMemoryBackend::Allocate(int64_t bytes) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("bytes is ", bytes, ", want at least 0"));
  }
  if (bytes == 0) return DeviceBuffer();
  return AllocateHostBuffer(bytes);
}

absl::Status HostMemoryBackend::CopyToDevice(DeviceSpan<std::byte> to,
                                             std::span<const std::byte> from, Stream& stream) {
  HW_CHECK(to.size() == static_cast<int64_t>(from.size()));
  std::copy(from.begin(), from.end(), to.device_address());
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::CopyToHost(std::span<std::byte> to,
                                           DeviceSpan<const std::byte> from, Stream& stream) {
  HW_CHECK(from.size() == static_cast<int64_t>(to.size()));
  std::copy_n(from.device_address(), from.size(), to.data());
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::CopyOnDevice(DeviceSpan<std::byte> to,
                                             DeviceSpan<const std::byte> from, Stream& stream) {
  HW_CHECK(to.size() == from.size());
  std::copy_n(from.device_address(), from.size(), to.device_address());
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::Zero(DeviceSpan<std::byte> span, Stream& stream) {
  std::fill_n(span.device_address(), span.size(), std::byte{0});
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::Synchronize(Stream& stream) { return absl::OkStatus(); }

absl::Status HostMemoryBackend::Append(const KvShape& shape, const AppendParams& params,
                                       Stream& stream) {
  HW_RETURN_IF_ERROR(CheckBackendShape(shape));
  for (const AppendItem& item : params.items) {
    HW_CHECK(static_cast<int64_t>(item.slots.size()) == item.layer.num_sets * item.num_tokens);
    for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
      for (int64_t token = 0; token < item.num_tokens; ++token) {
        AppendRow(shape, params, item, kv_head, token);
      }
    }
    AppendTables(item);
  }
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::CollectGains(const KvShape& shape, const LayerView& layer,
                                             DeviceSpan<int64_t> to, Stream& stream) {
  HW_CHECK(to.size() == layer.num_sets * layer.used);
  std::fill_n(to.device_address(), to.size(), 0);
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    int64_t* gains = layer.gains.device_address() + kv_head * layer.capacity;
    int64_t* sums = to.device_address() + SetOfKvHead(layer, kv_head) * layer.used;
    for (int64_t slot = 0; slot < layer.used; ++slot) sums[slot] += gains[slot];
    std::fill_n(gains, layer.used, 0);
  }
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::SumRows(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to,
                                        int64_t num_rows, int64_t count, Stream& stream) {
  HW_CHECK(from.size() == num_rows * count && to.size() == num_rows);
  for (int64_t row = 0; row < num_rows; ++row) {
    to.device_address()[row] =
        SumOfRow({from.device_address() + row * count, static_cast<size_t>(count)});
  }
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::AddScores(const LayerView& layer, DeviceSpan<const int64_t> from,
                                          double decay, Stream& stream) {
  HW_CHECK(from.size() == layer.num_sets * layer.used);
  for (int set = 0; set < layer.num_sets; ++set) {
    int64_t* scores = layer.scores.device_address() + set * layer.capacity;
    const int64_t* added = from.device_address() + set * layer.used;
    if (decay != 1.0) {
      for (int64_t slot = 0; slot < layer.used; ++slot) {
        scores[slot] = std::llrint(static_cast<double>(scores[slot]) * decay);
      }
    }
    for (int64_t slot = 0; slot < layer.used; ++slot) scores[slot] += added[slot];
  }
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::PoolVotes(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to,
                                          int num_rows, int64_t count, Pooling pooling, int kernel,
                                          Stream& stream) {
  HW_CHECK(from.size() == num_rows * count && to.size() == num_rows * count);
  HW_CHECK(kernel >= 1 && kernel % 2 == 1);
  for (int row = 0; row < num_rows; ++row) {
    PoolRow({from.device_address() + row * count, static_cast<size_t>(count)}, pooling, kernel,
            to.device_address() + row * count);
  }
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::CollectVictims(const VictimsParams& params, Stream& stream) {
  HW_CHECK(params.victims.size() == params.num_sets * params.max_victims);
  HW_CHECK(params.victim_scores.size() == params.victims.size());
  HW_CHECK(params.used <= params.stride && params.used <= params.kept_stride);
  for (int set = 0; set < params.num_sets; ++set) {
    HW_RETURN_IF_ERROR(CollectVictimsOfSet(params, set));
  }
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::GatherSlots(const KvShape& shape, const LayerView& from,
                                            const LayerView& to, std::span<const Position> kept,
                                            int64_t kept_per_set, DeviceSpan<const int64_t> seeds,
                                            int64_t seed_stride, Stream& stream) {
  HW_CHECK(static_cast<int64_t>(kept.size()) == to.num_sets * kept_per_set);
  HW_CHECK(kept_per_set <= to.capacity);
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    const KvHeadRows source = RowsOfKvHead(shape, from, kv_head);
    const KvHeadRows target = RowsOfKvHead(shape, to, kv_head);
    const Position* positions = kept.data() + SetOfKvHead(to, kv_head) * kept_per_set;
    for (int64_t slot = 0; slot < kept_per_set; ++slot) {
      std::memmove(target.Key(slot), source.Key(positions[slot]), target.row_bytes);
      std::memmove(target.Value(slot), source.Value(positions[slot]), target.row_bytes);
    }
    std::fill_n(to.gains.device_address() + kv_head * to.capacity, to.capacity, 0);
  }
  for (int set = 0; set < to.num_sets; ++set) {
    Position* positions = to.positions.device_address() + set * to.capacity;
    int64_t* scores = to.scores.device_address() + set * to.capacity;
    std::fill_n(positions, to.capacity, kNoPosition);
    std::fill_n(scores, to.capacity, 0);
    std::copy_n(kept.data() + set * kept_per_set, kept_per_set, positions);
    if (seeds.empty()) continue;
    for (int64_t slot = 0; slot < kept_per_set; ++slot) {
      scores[slot] = seeds.device_address()[set * seed_stride + positions[slot]];
    }
  }
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::ObserveQueries(const KvShape& shape,
                                               const ObserveQueriesParams& params, Stream& stream) {
  ObserveQueriesInHostMemory(shape, params);
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::ChooseChannels(const KvShape& shape,
                                               const ChooseChannelsParams& params, Stream& stream) {
  HW_RETURN_IF_ERROR(params.sketch.Validate());
  ChooseChannelsInHostMemory(shape, params);
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::EncodePages(const KvShape& shape, const EncodePagesParams& params,
                                            Stream& stream) {
  HW_RETURN_IF_ERROR(params.sketch.Validate());
  EncodePagesInHostMemory(shape, params);
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::PromoteSlots(const KvShape& shape, const LayerView& layer,
                                             const PromoteParams& params, Stream& stream) {
  HW_CHECK(params.set >= 0 && params.set < layer.num_sets);
  HW_CHECK(params.positions.size() == params.slots.size());
  HW_CHECK(params.scores.size() == params.slots.size());
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    if (SetOfKvHead(layer, kv_head) != params.set) continue;
    HW_RETURN_IF_ERROR(PromoteRows(shape, layer, params, kv_head));
  }
  for (size_t i = 0; i < params.slots.size(); ++i) {
    const int64_t slot = params.set * layer.capacity + params.slots[i];
    layer.positions.device_address()[slot] = params.positions[i];
    layer.scores.device_address()[slot] = params.scores[i];
  }
  return absl::OkStatus();
}

absl::Status HostMemoryBackend::ReleaseSlots(const KvShape& shape, const LayerView& layer, int set,
                                             std::span<const int32_t> slots, Stream& stream) {
  HW_CHECK(set >= 0 && set < layer.num_sets);
  for (const int32_t slot : slots) {
    HW_CHECK(slot >= 0 && slot < layer.capacity);
    layer.positions.device_address()[set * layer.capacity + slot] = kNoPosition;
    layer.scores.device_address()[set * layer.capacity + slot] = 0;
  }
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    if (SetOfKvHead(layer, kv_head) != set) continue;
    int64_t* gains = layer.gains.device_address() + kv_head * layer.capacity;
    for (const int32_t slot : slots) gains[slot] = 0;
  }
  return absl::OkStatus();
}

}  // namespace heavywater
