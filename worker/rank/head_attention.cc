#include "worker/rank/head_attention.h"

#include <algorithm>
#include <vector>

#include "cache_service/base/status.h"

namespace heavywater {
namespace {

bool IsByHead(const ActiveItem& item) {
  return item.status.ok() && item.sequence->blocks().divided;
}

// Every such sequence on a rank has blocks of this shape; null: there is none.
const KvShape* ShapeOfHeads(std::span<const ActiveItem> items) {
  const auto found = std::find_if(items.begin(), items.end(), IsByHead);
  return found == items.end() ? nullptr : &found->sequence->blocks().shape;
}

void AddAppends(const ActiveItem& item, int layer, std::vector<AppendItem>& appends) {
  const int heads = item.sequence->blocks().per_layer;
  const int64_t tokens = item.spec.num_tokens;
  // Those of this layer are the last that it has taken.
  const std::span<const int32_t> slots = std::span(item.slots).last(heads * tokens);
  for (int head = 0; head < heads; ++head) {
    for (int64_t token = 0; token < tokens; ++token) {
      AppendItem append;
      append.layer = item.sequence->View(item.sequence->blocks().BlockOf(layer, head));
      append.first_token = (item.first_row + token) * heads + head;
      append.num_tokens = 1;
      append.first_position = item.spec.first_position + static_cast<Position>(token);
      append.slots = slots.subspan(head * tokens + token, 1);
      appends.push_back(append);
    }
  }
}

void AddAttends(const ActiveItem& item, int layer, int64_t token,
                std::vector<AttendItem>& attends) {
  const int heads = item.sequence->blocks().per_layer;
  for (int head = 0; head < heads; ++head) {
    AttendItem attend;
    attend.layer = item.sequence->View(item.sequence->blocks().BlockOf(layer, head));
    attend.first_token = (item.first_row + token) * heads + head;
    attend.num_tokens = 1;
    attend.first_position = item.spec.first_position + static_cast<Position>(token);
    attend.accumulate_gains = item.sequence->budget().uses_scores;
    attend.gains = item.sequence->budget().gains;
    attends.push_back(attend);
  }
}

}  // namespace

absl::Status AppendHeads(RankCache& cache, std::span<const ActiveItem> items, int layer,
                         AppendParams params) {
  const KvShape* shape = ShapeOfHeads(items);
  if (shape == nullptr) return absl::OkStatus();
  std::vector<AppendItem> appends;
  for (const ActiveItem& item : items) {
    if (IsByHead(item)) AddAppends(item, layer, appends);
  }
  params.items = appends;
  return cache.backend().Append(*shape, params, cache.stream());
}

absl::Status AttendHeads(RankCache& cache, std::span<const ActiveItem> items, int layer,
                         AttendParams params) {
  int64_t most_tokens = 0;
  for (const ActiveItem& item : items) {
    if (IsByHead(item)) most_tokens = std::max(most_tokens, item.spec.num_tokens);
  }
  for (int64_t token = 0; token < most_tokens; ++token) {
    std::vector<AttendItem> attends;
    for (const ActiveItem& item : items) {
      if (IsByHead(item) && token < item.spec.num_tokens) AddAttends(item, layer, token, attends);
    }
    params.items = attends;
    HW_RETURN_IF_ERROR(cache.backend().Attend(*ShapeOfHeads(items), params, cache.stream()));
  }
  return absl::OkStatus();
}

int64_t HeadScratchBytes(RankCache& cache, std::span<const ActiveItem> items, int layer) {
  int64_t capacity = 0;
  for (const ActiveItem& item : items) {
    if (!IsByHead(item)) continue;
    const BlockLayout& blocks = item.sequence->blocks();
    for (int head = 0; head < blocks.per_layer; ++head) {
      const LayerStorage& block = item.sequence->storage(blocks.BlockOf(layer, head));
      capacity = std::max(capacity, block.capacity());
    }
  }
  if (capacity == 0) return 0;
  return cache.backend().AttendScratchBytes(*ShapeOfHeads(items), capacity, {});
}

}  // namespace heavywater
