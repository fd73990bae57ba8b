#include "worker/backend/cuda/recall.h"

#include <algorithm>
#include <cfloat>
#include <cstring>
#include <limits>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/cuda/cuda_check.h"
#include "worker/backend/cuda/recall_report.h"

namespace heavywater::cuda {
namespace {

// Sketches' addresses and those of the host's pages.
int64_t TableBytes(const KvShape& shape, const RecallView& recall) {
  return (1 + int64_t{shape.num_kv_heads}) * recall.num_pages * int64_t{sizeof(void*)};
}

int64_t MaxPicks(const RecallView& recall) {
  const int64_t positions = recall.num_pages * recall.sketch.page_tokens;
  return std::clamp<int64_t>(recall.max_picks, 0, positions);
}

absl::Status CheckItem(const KvShape& shape, const RecallView& recall) {
  HW_RETURN_IF_ERROR(recall.sketch.Validate());
  HW_CHECK(recall.sketch.head_dim == shape.head_dim &&
           recall.sketch.page_tokens == shape.page_tokens);
  HW_CHECK(recall.num_pages <= recall.host.num_pages &&
           recall.num_pages <= static_cast<int64_t>(recall.pages.size()));
  HW_CHECK(recall.num_pages * shape.page_tokens <= std::numeric_limits<int32_t>::max());
  if (recall.all) return absl::OkStatus();
  if (MaxPicks(recall) > kMaxPicks) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_picks is ", recall.max_picks, ", want at most ", kMaxPicks, " on a GPU, or all"));
  }
  const int64_t shared =
      ScanSharedBytes(shape.group_size(), shape.head_dim, recall.sketch.channels, MaxPicks(recall));
  if (shared > kMaxScanSharedBytes) {
    return absl::InvalidArgumentError(absl::StrCat(
        "recall for ", shape.group_size(), " query heads of size ", shape.head_dim,
        " per KV head with ", recall.sketch.channels, " sketch_channels and ", recall.max_picks,
        " picks takes ", shared, " bytes of shared memory, want at most ", kMaxScanSharedBytes));
  }
  return absl::OkStatus();
}

RecallItem ItemOf(const RecallView& recall) {
  RecallItem item = {};
  item.channels = recall.channels.device_address();
  item.demoted = recall.demoted.device_address();
  item.num_pages = static_cast<int32_t>(recall.num_pages);
  item.num_channels = recall.sketch.channels;
  item.page_bytes = static_cast<int32_t>(recall.sketch.page_bytes());
  item.max_picks = recall.all ? 0 : static_cast<int32_t>(MaxPicks(recall));
  item.min_share = std::max(recall.min_share, FLT_MIN);
  item.all = recall.all ? 1 : 0;
  item.report_picks = recall.gains.empty() && recall.picks.empty() ? 0 : 1;
  item.report_missing = recall.missing.empty() ? 0 : 1;
  item.parts = ScanParts(recall.num_pages);
  return item;
}

// Writes the tables to `host`, and to the item where they lie on the device.
void WriteTables(const KvShape& shape, const RecallView& recall, std::byte* host,
                 const std::byte* device, RecallItem& item) {
  auto* addresses = reinterpret_cast<const std::byte**>(host);
  for (int64_t page = 0; page < recall.num_pages; ++page) {
    *addresses++ = recall.pages[page].device_address();
  }
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    for (int64_t page = 0; page < recall.num_pages; ++page) {
      *addresses++ = recall.host.Page(kv_head, page);
    }
  }
  item.sketches = reinterpret_cast<const unsigned char* const*>(device);
  item.host = item.sketches + recall.num_pages;
}

}  // namespace

absl::Status CudaRecall::Begin(const KvShape& shape, std::span<const AttendItem> items,
                               std::span<const WaveToken> wave, const RecallLimits& limits,
                               std::byte* memory, cudaStream_t stream) {
  items_ = items;
  wave_ = {};
  wave_.first_item = wave.front().item;
  wave_.scratch = CutRecallScratch(shape, limits, static_cast<int64_t>(wave.size()), memory);
  const std::span<const AttendItem> of_wave =
      items.subspan(wave.front().item, wave.back().item - wave.front().item + 1);
  std::vector<RecallItem> device_items(of_wave.size());
  for (size_t i = 0; i < of_wave.size(); ++i) {
    if (of_wave[i].recall == nullptr) continue;
    HW_RETURN_IF_ERROR(CheckItem(shape, *of_wave[i].recall));
    const RecallItem& item = device_items[i] = ItemOf(*of_wave[i].recall);
    wave_.num_channels = std::max(wave_.num_channels, item.num_channels);
    wave_.parts = std::max(wave_.parts, item.parts);
    wave_.max_picks = std::max(wave_.max_picks, item.max_picks);
    if (item.report_missing != 0 && item.all == 0) wave_.any_missing = 1;
  }
  HW_CHECK(wave_.max_picks <= limits.max_picks);
  // Host pages may still be on their way.
  HW_RETURN_IF_ERROR(context_.JoinCopies(stream));
  return Upload(shape, of_wave, device_items);
}

// In one piece, but for waves with more pages than the staging ring has room for at
// once.
absl::Status CudaRecall::Upload(const KvShape& shape, std::span<const AttendItem> items,
                                std::vector<RecallItem>& device_items) {
  const auto item_bytes = static_cast<int64_t>(device_items.size() * sizeof(RecallItem));
  int64_t left = item_bytes;
  for (const AttendItem& item : items) {
    if (item.recall != nullptr) left += TableBytes(shape, *item.recall);
  }
  std::vector<StagingRing::Place> places;
  int64_t used = 0;
  const auto take = [&](int64_t bytes) -> absl::Status {
    if (!places.empty() && used + bytes <= places.back().bytes) return absl::OkStatus();
    const int64_t most = std::max(bytes, std::min(left, StagingRing::kMaxBytes));
    HW_ASSIGN_OR_RETURN(places.emplace_back(), context_.ring().Take(most));
    used = 0;
    return absl::OkStatus();
  };
  HW_RETURN_IF_ERROR(take(item_bytes));
  used = item_bytes;
  left -= item_bytes;
  for (size_t i = 0; i < items.size(); ++i) {
    if (items[i].recall == nullptr) continue;
    const int64_t bytes = TableBytes(shape, *items[i].recall);
    HW_RETURN_IF_ERROR(take(bytes));
    const StagingRing::Place& place = places.back();
    WriteTables(shape, *items[i].recall, place.host + used, place.device + used, device_items[i]);
    used += bytes;
    left -= bytes;
  }
  std::memcpy(places.front().host, device_items.data(), item_bytes);
  wave_.items = reinterpret_cast<const RecallItem*>(places.front().device);
  for (const StagingRing::Place& place : places) HW_RETURN_IF_ERROR(context_.ring().Send(place));
  return absl::OkStatus();
}

absl::Status CudaRecall::Pick(const RecallStep& step, cudaStream_t stream) {
  return HW_CUDA_STATUS(
      LaunchRecallPicks(step.dtype, step.shape, step.tokens, step.scratch, wave_, stream));
}

absl::Status CudaRecall::Report(const RecallStep& step, cudaStream_t stream) {
  const RecallTargets targets = TargetsOf(items_, step.host, step.shape.num_kv_heads);
  if (targets.empty()) return absl::OkStatus();
  HW_RETURN_IF_CUDA_ERROR(LaunchMissingScan(step.shape, step.tokens, step.scratch, wave_, stream));
  // In mode `all` there may be more picks than pinned memory at once.
  const int64_t lists = int64_t{step.shape.num_tokens} * step.shape.num_kv_heads;
  const int64_t at_once = std::max<int64_t>(PicksAtOnce(lists), 1);
  int64_t first = 0;
  do {
    const int64_t count = std::min(targets.max_picks - first, at_once);
    HW_ASSIGN_OR_RETURN(const RecallReport report,
                        ExpectReport(context_.results(), targets, lists, first, count, stream));
    HW_RETURN_IF_CUDA_ERROR(
        LaunchRecallReport(step.shape, step.tokens, step.scratch, wave_, report, stream));
    first += count;
  } while (first < targets.max_picks);
  return absl::OkStatus();
}

}  // namespace heavywater::cuda
