// Steps 1 to 3 for sequences whose KV heads hold sets of different sizes
// (HeadBudgets::kAdaptive).
#pragma once

#include <span>

#include "absl/status/status.h"
#include "worker/backend/backend.h"
#include "worker/rank/active_item.h"
#include "worker/rank/rank_cache.h"

namespace heavywater {

// To the backend each KV head is a layer of one KV head, and each of its rows a token of
// that: [rows][num_kv_heads][...] is [rows x num_kv_heads][1][...]. So every token and head
// is an item of its own. Other items are left alone. `params` of the whole step, without
// its items.
absl::Status AppendHeads(RankCache& cache, std::span<const ActiveItem> items, int layer,
                         AppendParams params);

// The tokens of an append one after the other, since they add to the same gains.
absl::Status AttendHeads(RankCache& cache, std::span<const ActiveItem> items, int layer,
                         AttendParams params);

// What AttendHeads() needs of params.scratch.
int64_t HeadScratchBytes(RankCache& cache, std::span<const ActiveItem> items, int layer);

}  // namespace heavywater
