#include "worker/backend/cuda/slots.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/backend/cuda/slot_kernels.h"

namespace heavywater::cuda {
namespace {

// Entries of a list that go to the device at once.
constexpr int64_t kListEntries = int64_t{64} << 10;

LayerSlots SlotsOf(const KvShape& shape, const LayerView& layer) {
  return {.keys = reinterpret_cast<unsigned char*>(layer.keys.device_address()),
          .values = reinterpret_cast<unsigned char*>(layer.values.device_address()),
          .positions = layer.positions.device_address(),
          .scores = layer.scores.device_address(),
          .gains = layer.gains.device_address(),
          .capacity = layer.capacity,
          .num_sets = layer.num_sets,
          .num_kv_heads = shape.num_kv_heads,
          .row_bytes = int64_t{shape.head_dim} * ElementBytes(shape.dtype)};
}

// The heads that share a set.
struct HeadsOfSet {
  int first;
  int count;
};
HeadsOfSet HeadsOf(const KvShape& shape, const LayerView& layer, int set) {
  return layer.num_sets == 1 ? HeadsOfSet{0, shape.num_kv_heads} : HeadsOfSet{set, 1};
}

bool IsAligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; }

// Pieces of items, as many as fit a launch's lists.
class AppendBatch {
 public:
  AppendBatch(CudaContext& context, const KvShape& shape, const AppendParams& params,
              cudaStream_t stream)
      : context_(context), shape_(shape), params_(params), stream_(stream) {}

  absl::Status Add(const AppendItem& item) {
    const int64_t bytes_of_token =
        4 * item.layer.num_sets + (params_.host_rows.empty() ? 0 : 8 * shape_.num_kv_heads);
    for (int64_t token = 0; token < item.num_tokens;) {
      const int64_t room = std::max<int64_t>((kListBytes - bytes_) / bytes_of_token, 1);
      const bool fits = room >= std::min<int64_t>(item.num_tokens - token, kLeastTokens) &&
                        pieces_.size() < kMostPieces;
      if (!fits && !pieces_.empty()) {
        HW_RETURN_IF_ERROR(Launch());
        continue;
      }
      const int64_t count = std::min(item.num_tokens - token, room);
      pieces_.push_back({.item = &item, .token = token, .count = count});
      bytes_ += count * bytes_of_token;
      token += count;
    }
    return absl::OkStatus();
  }

  absl::Status Launch();

 private:
  // Lists of a launch, and what alignment adds.
  static constexpr int64_t kListBytes = StagingRing::kMaxBytes / 2;
  static constexpr int64_t kLeastTokens = 256;
  static constexpr size_t kMostPieces = 4096;

  struct Piece {
    const AppendItem* item;
    int64_t token;
    int64_t count;
  };

  // Fills `place` from its start.
  void Fill(const StagingRing::Place& place) const;
  absl::Status WriteThrough(const AppendRecord* records, int most_tokens);

  CudaContext& context_;
  const KvShape& shape_;
  const AppendParams& params_;
  cudaStream_t stream_;
  std::vector<Piece> pieces_;
  int64_t bytes_ = 0;
};

// Lays lists out one after the other, on 8 bytes.
class ListWriter {
 public:
  explicit ListWriter(const StagingRing::Place& place) : place_(place) {}
  template <typename T>
  T* HostOf(int64_t offset) const {
    return reinterpret_cast<T*>(place_.host + offset);
  }
  template <typename T>
  T* DeviceOf(int64_t offset) const {
    return reinterpret_cast<T*>(place_.device + offset);
  }
  int64_t Take(int64_t bytes) {
    const int64_t offset = used_;
    used_ += (bytes + 7) / 8 * 8;
    HW_CHECK(used_ <= place_.bytes);
    return offset;
  }

 private:
  const StagingRing::Place& place_;
  int64_t used_ = 0;
};

void AppendBatch::Fill(const StagingRing::Place& place) const {
  ListWriter writer(place);
  const auto num_pieces = static_cast<int64_t>(pieces_.size());
  const int64_t first = writer.Take(num_pieces * static_cast<int64_t>(sizeof(AppendRecord)));
  auto* next = writer.HostOf<AppendRecord>(first);
  for (const auto& [item, token, count] : pieces_) {
    const int64_t row = item->first_token + token;
    const int64_t floats = row * shape_.num_kv_heads * shape_.head_dim;
    AppendRecord record = {.layer = SlotsOf(shape_, item->layer),
                           .keys = params_.keys.device_address() + floats,
                           .values = params_.values.device_address() + floats,
                           .slots = nullptr,
                           .host_rows = nullptr,
                           .num_tokens = static_cast<int32_t>(count),
                           .first_position = static_cast<int32_t>(item->first_position + token)};
    const int64_t slots = writer.Take(4 * item->layer.num_sets * count);
    record.slots = writer.DeviceOf<const int32_t>(slots);
    for (int set = 0; set < item->layer.num_sets; ++set) {
      std::copy_n(item->slots.data() + set * item->num_tokens + token, count,
                  writer.HostOf<int32_t>(slots) + set * count);
    }
    if (!params_.host_rows.empty()) {
      const int64_t heads = count * shape_.num_kv_heads;
      const int64_t rows = writer.Take(8 * heads);
      record.host_rows = writer.DeviceOf<unsigned char* const>(rows);
      std::memcpy(writer.HostOf<HostRow>(rows), &params_.host_rows[row * shape_.num_kv_heads],
                  heads * sizeof(HostRow));
    }
    *next++ = record;
  }
}

absl::Status AppendBatch::Launch() {
  static_assert(sizeof(HostRow) == sizeof(unsigned char*));
  if (pieces_.empty()) return absl::OkStatus();
  const auto num_pieces = static_cast<int64_t>(pieces_.size());
  HW_ASSIGN_OR_RETURN(const StagingRing::Place place,
                      context_.ring().Take(
                          bytes_ + num_pieces * (static_cast<int64_t>(sizeof(AppendRecord)) + 16)));
  Fill(place);
  HW_RETURN_IF_ERROR(context_.ring().Send(place));
  int64_t most_tokens = 0;
  for (const Piece& piece : pieces_) most_tokens = std::max(most_tokens, piece.count);
  const auto* records = reinterpret_cast<const AppendRecord*>(place.device);
  HW_RETURN_IF_CUDA_ERROR(LaunchAppend(shape_.dtype, shape_.head_dim, records,
                                       static_cast<int>(num_pieces), shape_.num_kv_heads,
                                       static_cast<int>(most_tokens), stream_));
  if (!params_.host_rows.empty()) {
    HW_RETURN_IF_ERROR(WriteThrough(records, static_cast<int>(most_tokens)));
  }
  pieces_.clear();
  bytes_ = 0;
  // What was taken so far belongs to work that is enqueued.
  return context_.RestartOperation(stream_);
}

absl::Status AppendBatch::WriteThrough(const AppendRecord* records, int most_tokens) {
  cuda::WriteThrough& copies = context_.copies();
  HW_RETURN_IF_ERROR(copies.Fork(stream_));
  context_.ring().AlsoUsedOn(copies.stream());
  HW_RETURN_IF_CUDA_ERROR(LaunchWriteThrough(records, static_cast<int>(pieces_.size()),
                                             shape_.num_kv_heads, most_tokens, copies.stream()));
  return copies.Enqueued();
}

absl::Status GatherRange(CudaContext& context, GatherParams params, std::span<const Position> kept,
                         int64_t kept_per_set, cudaStream_t stream) {
  const int64_t bytes = int64_t{params.to.num_sets} * params.count * 4;
  HW_ASSIGN_OR_RETURN(const StagingRing::Place place, context.ring().Take(bytes));
  for (int set = 0; set < params.to.num_sets; ++set) {
    std::copy_n(kept.data() + set * kept_per_set + params.first, params.count,
                reinterpret_cast<int32_t*>(place.host) + set * params.count);
  }
  HW_RETURN_IF_ERROR(context.ring().Send(place));
  params.kept = reinterpret_cast<const int32_t*>(place.device);
  HW_RETURN_IF_CUDA_ERROR(LaunchGatherRows(params, stream));
  HW_RETURN_IF_CUDA_ERROR(LaunchGatherTables(params, stream));
  return context.RestartOperation(stream);
}

// The rows' addresses, [heads][slots]; DATA_LOSS when one is missing.
absl::StatusOr<std::vector<const unsigned char*>> HostRowsOf(const KvShape& shape,
                                                             const PromoteParams& params,
                                                             HeadsOfSet heads) {
  std::vector<const unsigned char*> rows;
  rows.reserve(heads.count * params.positions.size());
  for (int head = heads.first; head < heads.first + heads.count; ++head) {
    for (const Position position : params.positions) {
      const std::byte* page = params.host.Page(head, position / shape.page_tokens);
      if (page == nullptr) {
        return absl::DataLossError(absl::StrCat("position ", position, " of KV head ", head,
                                                " is promoted, but has no host copy"));
      }
      rows.push_back(reinterpret_cast<const unsigned char*>(page) +
                     int64_t{position % shape.page_tokens} * shape.row_bytes());
      HW_CHECK(IsAligned(rows.back()));
    }
  }
  return rows;
}

}  // namespace

absl::Status Append(CudaContext& context, const KvShape& shape, const AppendParams& params,
                    cudaStream_t stream) {
  for (const AppendItem& item : params.items) {
    HW_CHECK(static_cast<int64_t>(item.slots.size()) == item.layer.num_sets * item.num_tokens);
    for (const int32_t slot : item.slots) HW_CHECK(slot >= 0 && slot < item.layer.capacity);
  }
  for (const HostRow& row : params.host_rows) HW_CHECK(IsAligned(row.row));
  HW_RETURN_IF_ERROR(context.JoinCopies(stream));
  AppendBatch batch(context, shape, params, stream);
  for (const AppendItem& item : params.items) HW_RETURN_IF_ERROR(batch.Add(item));
  return batch.Launch();
}

absl::Status GatherSlots(CudaContext& context, const KvShape& shape, const LayerView& from,
                         const LayerView& to, std::span<const Position> kept, int64_t kept_per_set,
                         DeviceSpan<const int64_t> seeds, int64_t seed_stride,
                         cudaStream_t stream) {
  HW_CHECK(static_cast<int64_t>(kept.size()) == to.num_sets * kept_per_set);
  HW_CHECK(kept_per_set <= to.capacity);
  for (const Position position : kept) HW_CHECK(position >= 0 && position < from.capacity);
  HW_RETURN_IF_ERROR(context.JoinCopies(stream));
  GatherParams params = {.from = SlotsOf(shape, from),
                         .to = SlotsOf(shape, to),
                         .kept = nullptr,
                         .seeds = seeds.empty() ? nullptr : seeds.device_address(),
                         .seed_stride = seed_stride,
                         .first = 0,
                         .count = 0};
  // Ascending: in place, later slots hold what earlier ones no longer need.
  const int64_t most = std::max<int64_t>(kListEntries / to.num_sets, 1);
  for (; params.first < kept_per_set; params.first += params.count) {
    params.count = std::min(kept_per_set - params.first, most);
    HW_RETURN_IF_ERROR(GatherRange(context, params, kept, kept_per_set, stream));
  }
  params.count = to.capacity - params.first;
  return HW_CUDA_STATUS(LaunchGatherTables(params, stream));
}

absl::Status PromoteSlots(CudaContext& context, const KvShape& shape, const LayerView& layer,
                          const PromoteParams& params, cudaStream_t stream) {
  HW_CHECK(params.set >= 0 && params.set < layer.num_sets);
  HW_CHECK(params.positions.size() == params.slots.size());
  HW_CHECK(params.scores.size() == params.slots.size());
  for (const int32_t slot : params.slots) HW_CHECK(slot >= 0 && slot < layer.capacity);
  const HeadsOfSet heads = HeadsOf(shape, layer, params.set);
  HW_ASSIGN_OR_RETURN(const auto rows, HostRowsOf(shape, params, heads));
  HW_RETURN_IF_ERROR(context.JoinCopies(stream));
  const size_t most = std::max<size_t>(kListEntries / heads.count, 1);
  const size_t total = params.slots.size();
  for (size_t first = 0; first < total; first += most) {
    const size_t count = std::min(total - first, most);
    std::vector<const unsigned char*> piece;
    for (int head = 0; head < heads.count; ++head) {
      const auto begin = rows.begin() + static_cast<int64_t>(head * total + first);
      piece.insert(piece.end(), begin, begin + static_cast<int64_t>(count));
    }
    PromoteRows promote = {.layer = SlotsOf(shape, layer),
                           .host_rows = nullptr,
                           .slots = nullptr,
                           .positions = nullptr,
                           .scores = nullptr,
                           .count = static_cast<int32_t>(count),
                           .set = params.set,
                           .first_kv_head = heads.first,
                           .heads = heads.count};
    HW_ASSIGN_OR_RETURN(promote.host_rows,
                        context.Upload(std::span<const unsigned char* const>(piece)));
    HW_ASSIGN_OR_RETURN(promote.slots, context.Upload(params.slots.subspan(first, count)));
    HW_ASSIGN_OR_RETURN(promote.positions, context.Upload(params.positions.subspan(first, count)));
    HW_ASSIGN_OR_RETURN(promote.scores, context.Upload(params.scores.subspan(first, count)));
    HW_RETURN_IF_CUDA_ERROR(LaunchPromote(promote, stream));
    HW_RETURN_IF_ERROR(context.RestartOperation(stream));
  }
  return absl::OkStatus();
}

absl::Status ReleaseSlots(CudaContext& context, const KvShape& shape, const LayerView& layer,
                          int set, std::span<const int32_t> slots, cudaStream_t stream) {
  HW_CHECK(set >= 0 && set < layer.num_sets);
  for (const int32_t slot : slots) HW_CHECK(slot >= 0 && slot < layer.capacity);
  const LayerSlots target = SlotsOf(shape, layer);
  for (size_t first = 0; first < slots.size(); first += kListEntries) {
    const auto piece = slots.subspan(first, std::min<size_t>(slots.size() - first, kListEntries));
    HW_ASSIGN_OR_RETURN(const int32_t* const uploaded, context.Upload(piece));
    HW_RETURN_IF_CUDA_ERROR(
        LaunchRelease(target, set, uploaded, static_cast<int>(piece.size()), stream));
    HW_RETURN_IF_ERROR(context.RestartOperation(stream));
  }
  return absl::OkStatus();
}

}  // namespace heavywater::cuda
