#include "tests/worker/rank/test_engine_group.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"

namespace heavywater {
namespace {

void AppendHeads(const std::vector<float>& from, int first, int count, int head_dim,
                 std::vector<float>& to) {
  const auto begin = from.begin() + int64_t{first} * head_dim;
  to.insert(to.end(), begin, begin + int64_t{count} * head_dim);
}

}  // namespace

TestEngineGroup::TestEngineGroup(const TestGroupOptions& options)
    : options_(options), rows_(options.rows) {
  if (!rows_) {
    rows_ = [shape = TestShape(options, 0), seed = options.seed](int layer, int32_t token,
                                                                 Position position) {
      return MakeSyntheticRow(shape, seed, layer, token, position);
    };
  }
  auto communicators = CreateLocalGroup(options.world_size, absl::Seconds(20));
  for (int rank = 0; rank < options.world_size; ++rank) {
    RankCacheOptions cache;
    cache.shape = TestShape(options, rank);
    cache.rank = rank;
    cache.world_size = options.world_size;
    cache.device_memory_bytes = options.device_memory_bytes;
    cache.max_step_tokens = options.max_step_tokens;
    cache.reserve_ahead_tokens = options.reserve_ahead_tokens;
    Rank& made = ranks_.emplace_back();
    made.backend = options.cpu_backend ? *CreateCpuBackend({}) : CreateReferenceBackend();
    made.communicator = std::move(communicators[rank]);
    auto created = RankCache::Create(cache, *made.backend,
                                     options.tiers.empty() ? nullptr : options.tiers[rank]);
    HW_CHECK(created.ok());
    made.cache = *std::move(created);
    made.engine = std::make_unique<AttentionEngine>(*made.cache, *made.communicator);
  }
}

absl::Status TestEngineGroup::Everywhere(const std::function<absl::Status(int)>& call) {
  std::vector<absl::Status> statuses(ranks_.size());
  std::vector<std::thread> threads;
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    threads.emplace_back([&, rank] { statuses[rank] = call(static_cast<int>(rank)); });
  }
  statuses[0] = call(0);
  for (std::thread& thread : threads) thread.join();
  for (size_t rank = 1; rank < ranks_.size(); ++rank) {
    if (statuses[rank].code() == statuses[0].code()) continue;
    return absl::InternalError(absl::StrCat("rank 0 returns ", statuses[0].ToString(), ", rank ",
                                            rank, " returns ", statuses[rank].ToString()));
  }
  return statuses[0];
}

absl::Status TestEngineGroup::Open(SequenceId sequence, const SequenceOptions& options) {
  return Everywhere([&](int rank) { return engine(rank).Open(sequence, options); });
}

absl::Status TestEngineGroup::Close(SequenceId sequence) {
  return Everywhere([&](int rank) { return engine(rank).Close(sequence); });
}

absl::Status TestEngineGroup::Begin(const std::vector<EngineAppend>& appends) {
  std::vector<EngineItem> items;
  for (const EngineAppend& append : appends) items.push_back(append.item);
  return Everywhere([&](int rank) { return engine(rank).Begin(items); });
}

SyntheticRow TestEngineGroup::RowsOf(int rank, int layer,
                                     const std::vector<EngineAppend>& appends) const {
  const KvShape shape = TestShape(options_, rank);
  SyntheticRow rows;
  for (const EngineAppend& append : appends) {
    for (size_t i = 0; i < append.tokens.size(); ++i) {
      const SyntheticRow row =
          rows_(layer, append.tokens[i], append.item.first_position + static_cast<Position>(i));
      AppendHeads(row.q, rank * shape.num_query_heads, shape.num_query_heads, shape.head_dim,
                  rows.q);
      AppendHeads(row.k, shape.first_kv_head, shape.num_kv_heads, shape.head_dim, rows.k);
      AppendHeads(row.v, shape.first_kv_head, shape.num_kv_heads, shape.head_dim, rows.v);
    }
  }
  return rows;
}

absl::Status TestEngineGroup::AttendRank(int rank, int layer,
                                         const std::vector<EngineAppend>& appends,
                                         int64_t part_rows) {
  const KvShape shape = TestShape(options_, rank);
  const SyntheticRow rows = RowsOf(rank, layer, appends);
  const size_t query_width = static_cast<size_t>(shape.num_query_heads) * shape.head_dim;
  const size_t kv_width = static_cast<size_t>(shape.num_kv_heads) * shape.head_dim;
  const size_t count = rows.q.size() / query_width;
  const size_t part = part_rows > 0 ? static_cast<size_t>(part_rows) : count;
  std::vector<float> out(rows.q.size());
  for (size_t first = 0; first < count; first += part) {
    const size_t n = std::min(part, count - first);
    HW_RETURN_IF_ERROR(engine(rank).AttendHost(
        layer, {.queries = std::span(rows.q).subspan(first * query_width, n * query_width),
                .keys = std::span(rows.k).subspan(first * kv_width, n * kv_width),
                .values = std::span(rows.v).subspan(first * kv_width, n * kv_width),
                .out = std::span(out).subspan(first * query_width, n * query_width)}));
  }
  auto next = out.begin();
  for (const EngineAppend& append : appends) {
    for (size_t i = 0; i < append.tokens.size(); ++i, next += query_width) {
      const Position position = append.item.first_position + static_cast<Position>(i);
      ranks_[rank].attention[{layer, append.tokens[i], position}].assign(next, next + query_width);
    }
  }
  return absl::OkStatus();
}

absl::Status TestEngineGroup::Attend(int layer, const std::vector<EngineAppend>& appends,
                                     int64_t part_rows) {
  return Everywhere([&](int rank) { return AttendRank(rank, layer, appends, part_rows); });
}

absl::Status TestEngineGroup::End() {
  return Everywhere([&](int rank) { return engine(rank).End(); });
}

absl::Status TestEngineGroup::Step(const std::vector<EngineAppend>& appends, int64_t part_rows) {
  HW_RETURN_IF_ERROR(Begin(appends));
  for (int layer = 0; layer < options_.num_layers; ++layer) {
    HW_RETURN_IF_ERROR(Attend(layer, appends, part_rows));
  }
  HW_RETURN_IF_ERROR(End());
  for (size_t item = 0; item < appends.size(); ++item) {
    HW_RETURN_IF_ERROR(Everywhere([&](int rank) { return engine(rank).item_status()[item]; }));
  }
  return absl::OkStatus();
}

std::vector<Ledger> TestEngineGroup::Sets(SequenceId sequence, int layer) {
  std::map<int, Ledger> by_head;
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    const auto kept = engine(static_cast<int>(rank)).Kept(sequence);
    HW_CHECK(kept.ok());
    for (const ResidentSet& set : kept->report.sets) {
      if (set.layer != layer) continue;
      Ledger ledger;
      for (size_t i = 0; i < set.positions.size(); ++i) ledger[set.positions[i]] = set.scores[i];
      const auto [found, added] = by_head.emplace(set.kv_head, ledger);
      HW_CHECK(added || found->second == ledger);
    }
  }
  std::vector<Ledger> sets;
  for (const auto& [head, ledger] : by_head) sets.push_back(ledger);
  return sets;
}

std::vector<float> TestEngineGroup::Attention(int layer, int32_t token, Position position) const {
  std::vector<float> all;
  for (const Rank& rank : ranks_) {
    const std::vector<float>& own = rank.attention.at({layer, token, position});
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

}  // namespace heavywater
