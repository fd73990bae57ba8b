#include "worker/backend/cuda/whole_wave.h"

#include <algorithm>

#include "worker/backend/cuda/attend_sizes.h"

namespace heavywater::cuda {
namespace {

// What the system keeps of a block's share.
constexpr int64_t kReservedBytes = 1024;

}  // namespace

int64_t WholeSharedBytes(int group_size, int head_dim, int64_t used) {
  const int64_t heads = HeadsAtOnce(head_dim, group_size);
  if (group_size > heads) return 0;
  const int64_t splits = (used + kSplitSlots - 1) / kSplitSlots;
  const int64_t dim = PaddedDim(head_dim);
  const int64_t shares = kSplitWarps / 2 * heads * dim * sizeof(float);
  if (splits * heads * static_cast<int64_t>(sizeof(double)) > shares) return 0;  // the factors
  return kTokenSharedBytes + kSplitSlots * static_cast<int64_t>(sizeof(int32_t)) +
         heads * dim * static_cast<int64_t>(sizeof(float)) + shares +
         splits * heads * kSplitSlots * static_cast<int64_t>(sizeof(float));
}

int64_t WholeWaveSharedBytes(const WaveShape& shape, std::span<const WaveToken> wave,
                             const DeviceLimits& device) {
  int64_t used = 0;
  int64_t most = 0;
  for (const WaveToken& token : wave) {
    if (token.recall >= 0) return 0;
    used += token.used;
    most = std::max<int64_t>(most, token.used);
  }
  const int64_t bytes =
      WholeSharedBytes(shape.num_query_heads / shape.num_kv_heads, shape.head_dim, most);
  const int64_t room =
      std::min(device.block_shared_bytes, device.shared_bytes / kWholeBlocks - kReservedBytes);
  if (bytes == 0 || bytes > room) return 0;
  // Places that the wave fills, against those that it would have while its longest run.
  const int64_t places = int64_t{device.multiprocessors} * kWholeBlocks;
  const int64_t blocks = static_cast<int64_t>(wave.size()) * shape.num_kv_heads;
  const int64_t rounds = (blocks + places - 1) / places;
  return 4 * used * shape.num_kv_heads >= 3 * rounds * places * most ? bytes : 0;
}

}  // namespace heavywater::cuda
