// What backends whose device memory is host memory have in common: allocation,
// copies, and the operations that only move or add integers. Attention and
// selection are left to the subclass.
#pragma once

#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/backend/backend.h"

namespace heavywater {

// INVALID_ARGUMENT when no backend can run this shape: head_dim must be a
// positive multiple of 8, at most kMaxKvHeadDim, and the KV heads must divide the query heads.
absl::Status CheckBackendShape(const KvShape& shape);

// Where the KV rows of one head of a layer lie.
struct KvHeadRows {
  std::byte* keys = nullptr;    // [capacity][head_dim] of the KV dtype
  std::byte* values = nullptr;  // likewise
  int64_t row_bytes = 0;        // of K or of V

  std::byte* Key(int64_t slot) const { return keys + slot * row_bytes; }
  std::byte* Value(int64_t slot) const { return values + slot * row_bytes; }
};
KvHeadRows RowsOfKvHead(const KvShape& shape, const LayerView& layer, int kv_head);

// The set of slots that a KV head shares.
inline int SetOfKvHead(const LayerView& layer, int kv_head) {
  return layer.num_sets == 1 ? 0 : kv_head;
}

// Every call has finished when it returns; streams are ignored. Not thread
// safe: one thread at a time uses a backend.
class HostMemoryBackend : public Backend {
 public:
  absl::Status CheckShape(const KvShape& shape) const override;
  absl::StatusOr<DeviceBuffer> Allocate(int64_t bytes) override;
  absl::Status CopyToDevice(DeviceSpan<std::byte> to, std::span<const std::byte> from,
                            Stream& stream) override;
  absl::Status CopyToHost(std::span<std::byte> to, DeviceSpan<const std::byte> from,
                          Stream& stream) override;
  absl::Status CopyOnDevice(DeviceSpan<std::byte> to, DeviceSpan<const std::byte> from,
                            Stream& stream) override;
  absl::Status Zero(DeviceSpan<std::byte> span, Stream& stream) override;
  absl::Status Synchronize(Stream& stream) override;
  absl::Status Append(const KvShape& shape, const AppendParams& params, Stream& stream) override;
  absl::Status RotateKeys(const KvShape& shape, const RotateKeysParams& params,
                          Stream& stream) override;
  absl::Status RotateQueries(const KvShape& shape, const RotateQueriesParams& params,
                             Stream& stream) override;
  absl::Status CollectGains(const KvShape& shape, const LayerView& layer, DeviceSpan<int64_t> to,
                            Stream& stream) override;
  absl::Status SumRows(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to, int64_t num_rows,
                       int64_t count, Stream& stream) override;
  absl::Status AddScores(const LayerView& layer, DeviceSpan<const int64_t> from, double decay,
                         Stream& stream) override;
  absl::Status PoolVotes(DeviceSpan<const int64_t> from, DeviceSpan<int64_t> to, int num_rows,
                         int64_t count, Pooling pooling, int kernel, Stream& stream) override;
  absl::Status CollectVictims(const VictimsParams& params, Stream& stream) override;
  // `from` and `to` may be the same layer: rows only move towards slot 0.
  absl::Status GatherSlots(const KvShape& shape, const LayerView& from, const LayerView& to,
                           std::span<const Position> kept, int64_t kept_per_set,
                           DeviceSpan<const int64_t> seeds, int64_t seed_stride,
                           Stream& stream) override;
  absl::Status ObserveQueries(const KvShape& shape, const ObserveQueriesParams& params,
                              Stream& stream) override;
  absl::Status ChooseChannels(const KvShape& shape, const ChooseChannelsParams& params,
                              Stream& stream) override;
  absl::Status EncodePages(const KvShape& shape, const EncodePagesParams& params,
                           Stream& stream) override;
  absl::Status PromoteSlots(const KvShape& shape, const LayerView& layer,
                            const PromoteParams& params, Stream& stream) override;
  absl::Status ReleaseSlots(const KvShape& shape, const LayerView& layer, int set,
                            std::span<const int32_t> slots, Stream& stream) override;
};

}  // namespace heavywater
