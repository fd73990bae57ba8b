// New rows into their slots; and from there to the host tier.
#include "worker/backend/cuda/launch.h"
#include "worker/backend/cuda/records.h"
#include "worker/cache/kv_element.h"

namespace heavywater::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;

// Eight channels as stored.
__device__ __forceinline__ unsigned Pair(uint16_t low, uint16_t high) {
  return low | static_cast<unsigned>(high) << 16;
}
__device__ __forceinline__ void StoreEight(BFloat16* to, const float4& a, const float4& b) {
  Store(reinterpret_cast<uint4*>(to),
        make_uint4(Pair(FloatToBFloat16Bits(a.x), FloatToBFloat16Bits(a.y)),
                   Pair(FloatToBFloat16Bits(a.z), FloatToBFloat16Bits(a.w)),
                   Pair(FloatToBFloat16Bits(b.x), FloatToBFloat16Bits(b.y)),
                   Pair(FloatToBFloat16Bits(b.z), FloatToBFloat16Bits(b.w))));
}
__device__ __forceinline__ void StoreEight(Float16* to, const float4& a, const float4& b) {
  Store(reinterpret_cast<uint4*>(to), make_uint4(Pair(FloatToHalf(a.x), FloatToHalf(a.y)),
                                                 Pair(FloatToHalf(a.z), FloatToHalf(a.w)),
                                                 Pair(FloatToHalf(b.x), FloatToHalf(b.y)),
                                                 Pair(FloatToHalf(b.z), FloatToHalf(b.w))));
}
__device__ __forceinline__ void StoreEight(float* to, const float4& a, const float4& b) {
  Store(reinterpret_cast<float4*>(to), a);
  Store(reinterpret_cast<float4*>(to) + 1, b);
}

// A warp per token and KV head: its lanes take eight channels of K or V at a time.
template <typename T>
__global__ void __launch_bounds__(kThreads) append_rows(int head_dim, const AppendRecord* records) {
  auto* record = reinterpret_cast<AppendRecord*>(SharedMemory());
  LoadRecord(records + blockIdx.y, record);
  const LayerSlots& layer = record->layer;
  const int row = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / kWarp);
  if (row >= record->num_tokens * layer.num_kv_heads) return;
  const int token = row / layer.num_kv_heads;
  const int kv_head = row % layer.num_kv_heads;
  const int lane = static_cast<int>(threadIdx.x % kWarp);
  const int slot = LoadForWarp(record->slots + SetOf(layer, kv_head) * record->num_tokens + token);
  const int eights = head_dim / 8;
  for (int i = lane; i < 2 * eights; i += kWarp) {
    const bool is_key = i < eights;
    const int eight = is_key ? i : i - eights;
    const float* from = (is_key ? record->keys : record->values) + int64_t{row} * head_dim;
    uint4* to = is_key ? KeyRow(layer, kv_head, slot) : ValueRow(layer, kv_head, slot);
    const float4* channels = reinterpret_cast<const float4*>(from) + 2 * eight;
    StoreEight(reinterpret_cast<T*>(to) + 8 * eight, LoadOnce(channels), LoadOnce(channels + 1));
  }
  if (lane == 0) {
    FillTables(layer, kv_head, slot, layer.num_sets > 1 || kv_head == 0,
               record->first_position + token, 0);
  }
}

// A warp per token and KV head: K, then V.
__global__ void __launch_bounds__(kThreads) write_rows_through(const AppendRecord* records) {
  auto* record = reinterpret_cast<AppendRecord*>(SharedMemory());
  LoadRecord(records + blockIdx.y, record);
  const LayerSlots& layer = record->layer;
  const int row = static_cast<int>(blockIdx.x * kWarps + threadIdx.x / kWarp);
  if (record->host_rows == nullptr || row >= record->num_tokens * layer.num_kv_heads) return;
  unsigned char* const host = LoadForWarp(record->host_rows + row);
  if (host == nullptr) return;
  const int token = row / layer.num_kv_heads;
  const int kv_head = row % layer.num_kv_heads;
  const int slot = LoadForWarp(record->slots + SetOf(layer, kv_head) * record->num_tokens + token);
  const uint4* keys = KeyRow(layer, kv_head, slot);
  const uint4* values = ValueRow(layer, kv_head, slot);
  const int words = static_cast<int>(layer.row_bytes / sizeof(uint4));
  for (int i = static_cast<int>(threadIdx.x % kWarp); i < 2 * words; i += kWarp) {
    StoreHost(reinterpret_cast<uint4*>(host) + i,
              Load(i < words ? keys + i : values + (i - words)));
  }
}

dim3 GridOf(int num_records, int num_kv_heads, int most_tokens) {
  return dim3(static_cast<unsigned>((most_tokens * num_kv_heads + kWarps - 1) / kWarps),
              static_cast<unsigned>(num_records));
}

}  // namespace

cudaError_t LaunchAppend(KvDtype dtype, int head_dim, const AppendRecord* records, int num_records,
                         int num_kv_heads, int most_tokens, cudaStream_t stream) {
  return WithKvElement(dtype, [&](auto element) {
    using T = typename decltype(element)::type;
    return Launch(append_rows<T>, GridOf(num_records, num_kv_heads, most_tokens), dim3(kThreads),
                  sizeof(AppendRecord), stream, head_dim, records);
  });
}

cudaError_t LaunchWriteThrough(const AppendRecord* records, int num_records, int num_kv_heads,
                               int most_tokens, cudaStream_t stream) {
  return Launch(write_rows_through, GridOf(num_records, num_kv_heads, most_tokens), dim3(kThreads),
                sizeof(AppendRecord), stream, records);
}

}  // namespace heavywater::cuda
