#include "tests/worker/rank/test_group.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"

namespace heavywater {
namespace {

std::unique_ptr<Backend> CreateBackend(const TestGroupOptions& options) {
  if (options.make_backend) return options.make_backend();
  if (!options.cpu_backend) return CreateReferenceBackend();
  auto backend = CreateCpuBackend({});
  HW_CHECK(backend.ok());
  return *std::move(backend);
}

}  // namespace

std::vector<double> TestRopeFrequencies(int head_dim) {
  std::vector<double> frequencies;
  for (int i = 0; i < head_dim; i += 2)
    frequencies.push_back(std::pow(100.0, -double{1} * i / head_dim));
  return frequencies;
}

KvShape TestShape(const TestGroupOptions& options, int rank) {
  KvShape shape;
  shape.num_layers = options.num_layers;
  shape.num_query_heads = options.query_heads / options.world_size;
  shape.num_kv_heads = std::max(options.kv_heads / options.world_size, 1);
  shape.first_kv_head = rank * options.kv_heads / options.world_size;
  shape.total_kv_heads = options.kv_heads;
  shape.total_query_heads = options.query_heads;
  shape.head_dim = options.head_dim;
  shape.dtype = options.dtype;
  shape.page_tokens = options.page_tokens;
  return shape;
}

SequenceOptions TestSequence(Policy policy, Scope scope, int64_t heavy, int64_t recent,
                             int64_t prompt_tokens, int64_t more_tokens) {
  SequenceOptions options;
  options.policy.policy = policy;
  options.policy.scope = scope;
  options.policy.heavy_tokens = heavy;
  options.policy.recent_tokens = recent;
  options.prompt_tokens = prompt_tokens;
  options.max_tokens = prompt_tokens + more_tokens;
  return options;
}

std::vector<int32_t> TestTokens(int tag, int64_t count, int64_t first) {
  std::vector<int32_t> tokens(count);
  for (int64_t i = 0; i < count; ++i) tokens[i] = static_cast<int32_t>(tag * 4096 + first + i);
  return tokens;
}

TestGroup::TestGroup(const TestGroupOptions& options) : options_(options), rows_(options.rows) {
  if (!rows_) {
    rows_ = [shape = TestShape(options, 0), seed = options.seed, placed = by_places()](
                int layer, int32_t token, Position position) {
      return MakeSyntheticRow(shape, seed, layer, token, placed ? 0 : position);
    };
  }
  for (int rank = 0; rank < options.world_size; ++rank) {
    RankCacheOptions cache;
    cache.shape = TestShape(options, rank);
    cache.rank = rank;
    cache.world_size = options.world_size;
    cache.hidden_size = SyntheticModel::kHiddenSize;
    cache.vocab_size = SyntheticModel::kVocabSize;
    cache.device_memory_bytes = options.device_memory_bytes;
    cache.max_step_tokens = options.max_step_tokens;
    cache.reserve_ahead_tokens = options.reserve_ahead_tokens;
    cache.rope_frequencies = options.rope_frequencies;
    cache.trained_tokens = options.trained_tokens;
    cache.rest_pages = options.rest_pages;
    cache.max_recall_wait = options.max_recall_wait;
    Rank& made = ranks_.emplace_back();
    made.backend = CreateBackend(options);
    auto created = RankCache::Create(cache, *made.backend,
                                     options.tiers.empty() ? nullptr : options.tiers[rank]);
    HW_CHECK(created.ok());
    made.cache = *std::move(created);
    made.model =
        std::make_unique<SyntheticModel>(cache.shape, rank * cache.shape.num_query_heads, rows_);
    if (options.make_backend) {
      made.on_device = std::make_unique<HostModel>(*made.model, *made.backend);
    }
    made.step = std::make_unique<DecodeStep>(*made.cache, made.stepped());
  }
}

absl::Status TestGroup::Everywhere(const std::function<absl::Status(int)>& call) {
  std::vector<absl::Status> statuses;
  for (int rank = 0; rank < world_size(); ++rank) statuses.push_back(call(rank));
  statuses_ = std::move(statuses);
  const absl::Status& first = statuses_[0];
  for (int rank = 1; rank < world_size(); ++rank) {
    const absl::Status& other = statuses_[rank];
    if (other.code() == first.code()) continue;
    return absl::InternalError(absl::StrCat("rank 0 returns ", first.ToString(), ", rank ", rank,
                                            " returns ", other.ToString()));
  }
  return first;
}

// As a communicator does it: unequal lengths are an error.
absl::Status TestGroup::Sum(const std::function<DeviceSpan<int64_t>(int)>& buffer) {
  std::vector<DeviceSpan<int64_t>> buffers;
  for (int rank = 0; rank < world_size(); ++rank) buffers.push_back(buffer(rank));
  if (tamper) tamper(buffers);
  for (const DeviceSpan<int64_t>& other : buffers) {
    if (other.size() == buffers[0].size()) continue;
    return absl::FailedPreconditionError(
        absl::StrCat("lengths ", buffers[0].size(), " and ", other.size()));
  }
  std::vector<int64_t> sums(buffers[0].size());
  std::vector<int64_t> values(sums.size());
  for (int rank = 0; rank < world_size(); ++rank) {
    Backend& backend = *ranks_[rank].backend;
    Stream& stream = cache(rank).stream();
    HW_RETURN_IF_ERROR(backend.CopyToHost(std::as_writable_bytes(std::span(values)),
                                          DeviceBytes<const int64_t>(buffers[rank]), stream));
    HW_RETURN_IF_ERROR(backend.Synchronize(stream));
    for (size_t i = 0; i < sums.size(); ++i) sums[i] += values[i];
  }
  return Everywhere([&](int rank) {
    return ranks_[rank].backend->CopyToDevice(DeviceBytes(buffers[rank]),
                                              std::as_bytes(std::span(sums)), cache(rank).stream());
  });
}

absl::Status TestGroup::Open(SequenceId sequence, const SequenceOptions& options) {
  return Everywhere([&](int rank) { return cache(rank).Open(sequence, options); });
}

absl::Status TestGroup::Close(SequenceId sequence) {
  return Everywhere([&](int rank) { return cache(rank).Close(sequence); });
}

absl::Status TestGroup::RunPrompt(SequenceId sequence, const std::vector<int32_t>& tokens) {
  std::vector<std::unique_ptr<PromptPass>> passes(world_size());
  HW_RETURN_IF_ERROR(Everywhere([&](int rank) -> absl::Status {
    HW_ASSIGN_OR_RETURN(passes[rank],
                        PromptPass::Create(cache(rank), ranks_[rank].stepped(), sequence, tokens));
    return absl::OkStatus();
  }));
  while (!passes[0]->done()) {
    HW_RETURN_IF_ERROR(Everywhere([&](int rank) { return passes[rank]->LayerBefore(); }));
    HW_RETURN_IF_ERROR(Sum([&](int rank) { return passes[rank]->reduce_buffer(); }));
    HW_RETURN_IF_ERROR(Everywhere([&](int rank) { return passes[rank]->LayerAfter(); }));
  }
  return Everywhere([&](int rank) { return passes[rank]->ComputeLogits().status(); });
}

absl::Status TestGroup::OpenAndRunPrompt(SequenceId sequence, const SequenceOptions& options,
                                         const std::vector<int32_t>& tokens) {
  HW_RETURN_IF_ERROR(Open(sequence, options));
  return RunPrompt(sequence, tokens);
}

absl::Status TestGroup::RunStep(const StepDescriptor& descriptor) {
  HW_RETURN_IF_ERROR(Everywhere([&](int rank) { return step(rank).Before(descriptor); }));
  HW_RETURN_IF_ERROR(Sum([&](int rank) { return step(rank).reduce_buffer(); }));
  return Everywhere([&](int rank) { return step(rank).After(); });
}

StepDescriptor TestGroup::Describe(const std::vector<TestAppend>& appends) {
  StepDescriptor descriptor;
  descriptor.step = next_step_++;
  for (const TestAppend& append : appends) {
    const auto count = static_cast<int64_t>(append.tokens.size());
    const absl::StatusOr<SequenceStats> stats = cache().Stats(append.sequence);
    descriptor.items.push_back(
        {.sequence = append.sequence,
         .first_position = stats.ok() ? static_cast<Position>(stats->tokens_seen) : 0,
         .num_tokens = count,
         .plan_due = cache().PlanDue(append.sequence, count)});
    descriptor.tokens.insert(descriptor.tokens.end(), append.tokens.begin(), append.tokens.end());
  }
  return descriptor;
}

absl::Status TestGroup::Append(const std::vector<TestAppend>& appends) {
  HW_RETURN_IF_ERROR(RunStep(Describe(appends)));
  for (size_t item = 0; item < appends.size(); ++item) {
    HW_RETURN_IF_ERROR(Everywhere([&](int rank) { return step(rank).item_status()[item]; }));
  }
  return absl::OkStatus();
}

std::vector<Ledger> TestGroup::Sets(SequenceId sequence, int layer) {
  std::map<int, Ledger> by_head;
  for (int rank = 0; rank < world_size(); ++rank) {
    auto report = cache(rank).Report(sequence, /*with_sets=*/true);
    HW_CHECK(report.ok());
    for (const ResidentSet& set : report->sets) {
      if (set.layer != layer) continue;
      Ledger ledger;
      for (size_t i = 0; i < set.positions.size(); ++i) {
        ledger[set.positions[i]] = set.scores[i];
      }
      const auto [known, is_new] = by_head.try_emplace(set.kv_head, ledger);
      HW_CHECK(is_new || known->second == ledger);
    }
  }
  std::vector<Ledger> sets;
  for (auto& [head, ledger] : by_head) sets.push_back(std::move(ledger));
  return sets;
}

std::vector<float> TestGroup::Attention(int layer, int32_t token, Position position) {
  std::vector<float> all;
  if (by_places()) position = 0;  // where the model is told to leave the rows
  for (int rank = 0; rank < world_size(); ++rank) {
    const std::vector<float>& own = model(rank).attention(layer, token, position);
    all.insert(all.end(), own.begin(), own.end());
  }
  return all;
}

SyntheticRow TestGroup::Rows(int layer, const std::vector<int32_t>& tokens, Position first) const {
  SyntheticRow rows;
  for (size_t i = 0; i < tokens.size(); ++i) {
    const SyntheticRow row = rows_(layer, tokens[i], first + static_cast<Position>(i));
    rows.q.insert(rows.q.end(), row.q.begin(), row.q.end());
    rows.k.insert(rows.k.end(), row.k.begin(), row.k.end());
    rows.v.insert(rows.v.end(), row.v.begin(), row.v.end());
  }
  return rows;
}

PlainShape TestGroup::plain_shape() const {
  return {.num_query_heads = options_.query_heads,
          .num_kv_heads = options_.kv_heads,
          .head_dim = options_.head_dim,
          .dtype = options_.dtype,
          .page_tokens = options_.page_tokens,
          .rope_frequencies = options_.rope_frequencies};
}

}  // namespace heavywater
