#include "worker/rank/prompt_layer.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/backend/pooling.h"
#include "worker/cache/device_bytes.h"
#include "worker/cache/read_device.h"
#include "worker/rank/agreement.h"
#include "worker/rank/exposure.h"
#include "worker/rank/workspace.h"

namespace heavywater {

PromptLayer::PromptLayer(RankCache& cache, SequenceCache& sequence)
    : cache_(cache),
      sequence_(sequence),
      num_tokens_(sequence.options().prompt_tokens),
      own_sets_(SetLayoutOf(cache.options(), sequence.options().policy.scope).own_sets) {
  region_.sets = PromptSetsOf(cache.options(), sequence.options().policy);
  region_.begin = int64_t{kPromptFields} * cache.options().world_size;
  region_.used = {num_tokens_};
}

absl::StatusOr<std::unique_ptr<PromptLayer>> PromptLayer::Create(RankCache& cache,
                                                                 SequenceCache& sequence) {
  std::unique_ptr<PromptLayer> layer(new PromptLayer(cache, sequence));
  HW_RETURN_IF_ERROR(layer->Allocate());
  return layer;
}

absl::Status PromptLayer::Allocate() {
  DeviceMemory& memory = cache_.mutable_memory();
  const int64_t own = own_sets_ * num_tokens_;
  const KvShape& shape = cache_.options().shape;
  for (int layer = 0; layer < WholeLayers(shape, sequence_.options()); ++layer) {
    HW_ASSIGN_OR_RETURN(LayerStorage whole, LayerStorage::CreateWhole(shape, own_sets_, num_tokens_,
                                                                      memory, cache_.stream()));
    kv_.push_back(std::move(whole));
  }
  const auto allocate = [&memory](int64_t bytes) {
    return memory.Allocate(MemoryKind::kWorkspace, bytes);
  };
  HW_ASSIGN_OR_RETURN(sums_,
                      allocate((region_.end() + region_.num_rows()) * int64_t{sizeof(int64_t)}));
  HW_ASSIGN_OR_RETURN(votes_, allocate(own * int64_t{sizeof(int64_t)}));
  HW_ASSIGN_OR_RETURN(mask_, allocate(own));
  HW_ASSIGN_OR_RETURN(
      scratch_, memory.Allocate(MemoryKind::kScratch, cache_.backend().PromptScratchBytes(
                                                          cache_.options().shape, num_tokens_)));
  if (sequence_.places() == nullptr) return absl::OkStatus();
  HW_ASSIGN_OR_RETURN(turned_keys_, memory.Allocate(MemoryKind::kPromptKv, View(0, 0).keys.size()));
  return absl::OkStatus();
}

int64_t PromptLayer::bytes() const {
  int64_t bytes = turned_keys_.bytes();
  for (const LayerStorage& layer : kv_) bytes += layer.bytes();
  return bytes;
}

LayerView PromptLayer::View(int layer, int64_t used) const {
  LayerView view = kv_[kv_.size() == 1 ? 0 : layer].View(cache_.options().shape);
  view.used = used;
  return view;
}

absl::Status PromptLayer::Append(int layer, Position first, int64_t count,
                                 const AttentionRows& rows) {
  const KvShape& shape = cache_.options().shape;
  std::vector<int32_t> slots(region_.sets.own_sets * count);
  for (int set = 0; set < region_.sets.own_sets; ++set) {
    std::iota(slots.begin() + set * count, slots.begin() + (set + 1) * count, first);
  }
  std::vector<HostRow> host_rows;
  if (sequence_.host_pages().writes()) {
    host_rows.resize(count * shape.num_kv_heads);
    sequence_.host_pages().FillRows(layer, first, first + count, host_rows);
  }
  AppendItem item;
  item.layer = View(layer, first + count);
  item.num_tokens = count;
  item.first_position = first;
  item.slots = slots;
  AppendParams append;
  append.items = std::span(&item, 1);
  append.keys = rows.keys;
  append.values = rows.values;
  append.host_rows = host_rows;
  return cache_.backend().Append(shape, append, cache_.stream());
}

absl::Status PromptLayer::LoadStored(int layer, int64_t count) {
  if (!sequence_.host_pages().readable()) {
    return absl::DataLossError(
        absl::StrCat("the stored pages of the first ", count, " tokens are lost"));
  }
  const LayerView view = View(layer, count);
  std::vector<int32_t> slots(static_cast<size_t>(count));
  std::iota(slots.begin(), slots.end(), 0);
  const std::vector<Position> positions(slots.begin(), slots.end());
  const std::vector<int64_t> scores(slots.size(), 0);
  const KvShape& shape = cache_.options().shape;
  const std::vector<const std::byte*> pages = sequence_.host_pages().AllPages(layer);
  for (int set = 0; set < view.num_sets; ++set) {
    const PromoteParams params{
        .set = set,
        .slots = slots,
        .positions = positions,
        .scores = scores,
        .host = {.pages = pages,
                 .num_pages = static_cast<int64_t>(pages.size()) / shape.num_kv_heads}};
    HW_RETURN_IF_ERROR(cache_.backend().PromoteSlots(shape, view, params, cache_.stream()));
  }
  // The lists above are read as the stream runs.
  return cache_.backend().Synchronize(cache_.stream());
}

absl::Status PromptLayer::AppendAndAttend(int layer, Position first, int64_t count,
                                          const AttentionRows& rows) {
  HW_RETURN_IF_ERROR(Append(layer, first, count, rows));
  PromptParams attend;
  attend.layer = View(layer, first + count);
  attend.num_tokens = count;
  attend.first_position = first;
  attend.score_from = static_cast<Position>(sequence_.first_scored_query());
  attend.gains = sequence_.budget().gains;
  attend.queries = rows.queries;
  attend.out = rows.out;
  attend.scratch = scratch_.As<std::byte>();
  attend.scale = cache_.attention_scale();
  if (sequence_.places() != nullptr) HW_RETURN_IF_ERROR(TurnToPlaces(attend));
  HW_RETURN_IF_ERROR(
      cache_.backend().AttendPrompt(cache_.options().shape, attend, cache_.stream()));
  SequenceRecall* recall = sequence_.recall();
  if (recall == nullptr || first + count <= num_tokens_ - kSketchQueries) return absl::OkStatus();
  return recall->Observe(layer, attend.queries, count, first);
}

// Nothing has left the cache yet: a place is a position.
absl::Status PromptLayer::TurnToPlaces(PromptParams& attend) {
  const KvShape& shape = cache_.options().shape;
  LayerView& layer = attend.layer;
  std::vector<int32_t> places(layer.num_sets * layer.used);
  for (int set = 0; set < layer.num_sets; ++set) {
    std::iota(places.begin() + set * layer.used, places.begin() + (set + 1) * layer.used, 0);
  }
  RotateKeysParams keys;
  keys.layer = layer;
  keys.places = places;
  keys.angles = sequence_.places()->angles();
  keys.to = turned_keys_.As<std::byte>();
  HW_RETURN_IF_ERROR(cache_.backend().RotateKeys(shape, keys, cache_.stream()));
  layer.keys = keys.to;
  HW_ASSIGN_OR_RETURN(const DeviceSpan<float> turned,
                      cache_.workspace().TurnedQueries(attend.num_tokens));
  const RotateQueriesParams queries = {
      .from = attend.queries,
      .to = turned,
      .places = std::span(places).subspan(attend.first_position, attend.num_tokens),
      .angles = keys.angles};
  HW_RETURN_IF_ERROR(cache_.backend().RotateQueries(shape, queries, cache_.stream()));
  attend.queries = turned;
  return absl::OkStatus();
}

bool PromptLayer::has_scores() const {
  return sequence_.budget().prompt_scores != PromptScores::kNone;
}

absl::Status PromptLayer::CollectSums(int layer) {
  const DeviceSpan<int64_t> sums = sums_.As<int64_t>();
  HW_RETURN_IF_ERROR(cache_.backend().Zero(DeviceBytes(sums), cache_.stream()));
  HW_RETURN_IF_ERROR(cache_.backend().CollectGains(cache_.options().shape, View(layer, num_tokens_),
                                                   region_.Own(sums, 0), cache_.stream()));
  if (region_.sets.reduced_sets > 0) return absl::OkStatus();
  const absl::Status sums_status = CheckSums(layer);
  if (sums_status.ok()) return sums_status;
  return Annotate(sums_status, absl::StrCat("rank ", cache_.options().rank));
}

absl::Status PromptLayer::WriteAgreement(std::span<const int64_t> entries) {
  HW_CHECK(static_cast<int64_t>(entries.size()) == region_.begin);
  return cache_.backend().CopyToDevice(DeviceBytes(sums_.As<int64_t>(0, region_.begin)),
                                       std::as_bytes(entries), cache_.stream());
}

DeviceSpan<int64_t> PromptLayer::reduce_buffer() const {
  const bool reduced = has_scores() && region_.sets.reduced_sets > 0;
  return sums_.As<int64_t>(0, reduced ? region_.end() : region_.begin);
}

absl::StatusOr<std::vector<int64_t>> PromptLayer::ReadAgreement() const {
  return ToHost(sums_.As<int64_t>(0, region_.begin));
}

absl::Status PromptLayer::CheckReducedSums(int layer) const {
  return region_.sets.reduced_sets > 0 ? CheckSums(layer) : absl::OkStatus();
}

absl::Status PromptLayer::CheckSums(int layer) const {
  if (!has_scores()) return absl::OkStatus();
  const DeviceSpan<int64_t> buffer = sums_.As<int64_t>();
  const DeviceSpan<int64_t> row_sums = buffer.Sub(region_.end(), region_.num_rows());
  HW_RETURN_IF_ERROR(SumGainRows(region_, buffer, row_sums, cache_.backend(), cache_.stream()));
  HW_ASSIGN_OR_RETURN(const std::vector<int64_t> sums, ToHost(row_sums));
  return CheckMass(cache_.options().shape, sequence_.options().policy.scope,
                   sequence_.budget().gains, region_, num_tokens_ - sequence_.first_scored_query(),
                   layer, sums);
}

// SnapKV pools the votes on the columns before the window; the window's own
// columns do not compete. Other policies rank by the sums as they are, or with
// exposure by what each query that saw a position has given it.
absl::StatusOr<DeviceSpan<int64_t>> PromptLayer::Ranking() {
  const Budget& budget = sequence_.budget();
  const DeviceSpan<int64_t> sums = region_.Own(sums_.As<int64_t>(), 0);
  if (!budget.window_votes) return ExposedSums(sums);
  Backend& backend = cache_.backend();
  const DeviceSpan<int64_t> votes = votes_.As<int64_t>();
  HW_RETURN_IF_ERROR(backend.Zero(DeviceBytes(votes), cache_.stream()));
  const int64_t before = num_tokens_ - budget.window;
  for (int set = 0; set < region_.sets.own_sets && before > 0; ++set) {
    const int64_t row = set * num_tokens_;
    if (budget.pooling == Pooling::kNone) {
      HW_RETURN_IF_ERROR(backend.CopyOnDevice(DeviceBytes(votes.Sub(row, before)),
                                              DeviceBytes(sums.Sub(row, before)), cache_.stream()));
    } else {
      HW_RETURN_IF_ERROR(backend.PoolVotes(sums.Sub(row, before), votes.Sub(row, before), 1, before,
                                           budget.pooling, budget.pool_kernel, cache_.stream()));
    }
  }
  return votes;
}

absl::StatusOr<DeviceSpan<int64_t>> PromptLayer::ExposedSums(DeviceSpan<int64_t> sums) {
  const double exposure = sequence_.options().policy.exposure;
  if (exposure == 0 || !has_scores()) return sums;
  HW_ASSIGN_OR_RETURN(std::vector<int64_t> values, ToHost(sums));
  Expose(values);
  const DeviceSpan<int64_t> votes = votes_.As<int64_t>();
  HW_RETURN_IF_ERROR(cache_.backend().CopyToDevice(
      DeviceBytes(votes), std::as_bytes(std::span(values)), cache_.stream()));
  return votes;
}

// Rows of all positions.
void PromptLayer::Expose(std::span<int64_t> sums) const {
  const double exposure = sequence_.options().policy.exposure;
  for (size_t i = 0; i < sums.size(); ++i) {
    const int64_t position = static_cast<int64_t>(i) % num_tokens_;
    const int64_t queries = num_tokens_ - std::max(position, sequence_.first_scored_query());
    sums[i] = ExposedValue(sums[i], queries, exposure);
  }
}

// Of each set of `whole`; `ranking` is [sets][num_tokens].
absl::StatusOr<std::vector<Position>> PromptLayer::ChooseKept(const LayerView& whole,
                                                              DeviceSpan<const int64_t> ranking,
                                                              const LayerBudget& budget) {
  const int sets = whole.num_sets;
  const int64_t kept_per_set = PromptKept(budget, num_tokens_);
  std::vector<Position> kept(sets * kept_per_set);
  if (kept_per_set == num_tokens_) {
    for (int set = 0; set < sets; ++set) {
      std::iota(kept.begin() + set * num_tokens_, kept.begin() + (set + 1) * num_tokens_, 0);
    }
    return kept;
  }
  SelectParams params;
  params.positions = whole.positions;
  params.scores = ranking;
  params.kept = mask_.As<uint8_t>(0, sets * num_tokens_);
  params.num_sets = sets;
  params.stride = num_tokens_;
  params.count = num_tokens_;
  params.selection = {.budget_tokens = budget.prompt_budget_tokens,
                      .sink_tokens = sequence_.budget().sink_tokens,
                      .recent_tokens = sequence_.budget().prompt_recent_tokens,
                      .tokens_seen = num_tokens_};
  HW_RETURN_IF_ERROR(cache_.backend().Select(params, cache_.stream()));
  HW_ASSIGN_OR_RETURN(const std::vector<uint8_t> mask,
                      ReadDevice(params.kept, cache_.backend(), cache_.stream()));
  auto next = kept.begin();
  for (int64_t i = 0; i < sets * num_tokens_; ++i) {
    if (mask[i] != 0) *next++ = static_cast<Position>(i % num_tokens_);
  }
  HW_CHECK(next == kept.end());
  return kept;
}

absl::StatusOr<std::vector<int64_t>> PromptLayer::ToHost(DeviceSpan<const int64_t> from) const {
  return ReadDevice(from, cache_.backend(), cache_.stream());
}

// The pooled votes instead of the raw sums; the window's own columns have no votes
// and keep their sums. The votes' memory is free by now.
absl::StatusOr<DeviceSpan<const int64_t>> PromptLayer::PooledSeeds() {
  const Budget& budget = sequence_.budget();
  HW_ASSIGN_OR_RETURN(std::vector<int64_t> seeds, ToHost(region_.Own(sums_.As<int64_t>(), 0)));
  const auto before = static_cast<size_t>(num_tokens_ - budget.window);
  std::vector<int64_t> pooled(before);
  for (int set = 0; set < region_.sets.own_sets; ++set) {
    const std::span<int64_t> row = std::span(seeds).subspan(set * num_tokens_, before);
    PoolRow(row, budget.pooling, budget.pool_kernel, pooled.data());
    if (budget.pooling == Pooling::kAverage) {
      for (int64_t& sum : pooled) sum = std::llrint(static_cast<double>(sum) / budget.pool_kernel);
    }
    std::copy(pooled.begin(), pooled.end(), row.begin());
  }
  const DeviceSpan<int64_t> votes = votes_.As<int64_t>();
  HW_RETURN_IF_ERROR(cache_.backend().CopyToDevice(
      DeviceBytes(votes), std::as_bytes(std::span(seeds)), cache_.stream()));
  return DeviceSpan<const int64_t>(votes);
}

// What the kept positions' scores start from; empty for policies without scores.
absl::StatusOr<DeviceSpan<const int64_t>> PromptLayer::Seeds() {
  const Budget& budget = sequence_.budget();
  if (budget.prompt_scores == PromptScores::kNone) return DeviceSpan<const int64_t>();
  const bool pooled = sequence_.options().policy.pooled_seeds && budget.window_votes;
  if (pooled) return PooledSeeds();
  return DeviceSpan<const int64_t>(region_.Own(sums_.As<int64_t>(), 0));
}

absl::Status PromptLayer::Compress(int layer) {
  HW_RETURN_IF_ERROR(sequence_.blocks().divided ? CompressHeads(layer) : CompressWhole(layer));
  if (kv_.size() > 1) kv_[layer] = LayerStorage();
  return absl::OkStatus();
}

absl::Status PromptLayer::CompressWhole(int layer) {
  const LayerView whole = View(layer, num_tokens_);
  const LayerBudget budget = sequence_.budget().OfLayer(layer);
  DeviceSpan<const int64_t> ranking;
  if (PromptKept(budget, num_tokens_) < num_tokens_) {
    HW_ASSIGN_OR_RETURN(ranking, Ranking());
  }
  HW_ASSIGN_OR_RETURN(const std::vector<Position> kept, ChooseKept(whole, ranking, budget));
  HW_ASSIGN_OR_RETURN(const DeviceSpan<const int64_t> seeds, Seeds());
  std::vector<int64_t> demoted_scores;
  if (sequence_.recall() != nullptr && !seeds.empty()) {
    HW_ASSIGN_OR_RETURN(demoted_scores, ToHost(seeds));
  }
  return sequence_.AddPromptBlock(whole, kept, seeds, demoted_scores);
}

}  // namespace heavywater
