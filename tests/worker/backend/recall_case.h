// Cases of Backend::Attend with recall.
#pragma once

#include <cstdint>
#include <random>

#include "tests/worker/backend/backend_test_base.h"

namespace heavywater {

KvShape RecallShape(int num_query_heads, int num_kv_heads, int head_dim, KvDtype dtype,
                    int page_tokens = 64);
// Up to 3 KV heads of any head and page size and dtype.
KvShape RandomRecallShape(std::mt19937& rng, int group_size);

// A sequence of `num_positions` of which slot i holds position i or nothing, and
// what is in no slot is demoted. The last `num_tokens` are resident.
AttendCase::Item Demoted(std::mt19937& rng, const KvShape& shape, int num_sets,
                         int64_t num_positions, int64_t num_tokens, double fraction);

AttendCase RandomRecallCase(std::mt19937& rng, const KvShape& shape, int num_items);
// The item alone, with random queries.
AttendCase OneItem(std::mt19937& rng, const KvShape& shape, AttendCase::Item item);

}  // namespace heavywater
