#include "worker/rank/sequence_recall.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/rank/recall_memory.h"
#include "worker/rank/restrided.h"

namespace heavywater {
namespace {

// The missing attention is sampled at plans, and at every so many steps where plans
// are rare or none, the first one included.
constexpr int64_t kSampleSteps = 16;

int64_t FewestRecent(const Budget& budget, int num_layers) {
  int64_t fewest = budget.OfLayer(0).recent_tokens;
  for (int layer = 1; layer < num_layers; ++layer) {
    fewest = std::min(fewest, budget.OfLayer(layer).recent_tokens);
  }
  return fewest;
}

}  // namespace

SequenceRecall::SequenceRecall(const RankCacheOptions& rank, const SequenceOptions& sequence,
                               const Budget& budget, DeviceMemory& memory, Stream& stream,
                               const HostPages& pages)
    : rank_(rank),
      options_(sequence),
      sketch_(SketchShapeOf(rank.shape, sequence.policy)),
      num_sets_(SetLayoutOf(rank, sequence.policy.scope).own_sets),
      recent_tokens_(FewestRecent(budget, rank.shape.num_layers)),
      prompt_demotes_(PromptDemotes(budget, sequence.prompt_tokens)),
      memory_(memory),
      stream_(stream),
      host_pages_(pages),
      rests_(rank.rest_pages && !sequence.policy.recall.all),
      rest_(rank.shape.num_layers, rank.shape.num_kv_heads) {}

absl::StatusOr<std::unique_ptr<SequenceRecall>> SequenceRecall::Create(
    const RankCacheOptions& rank, const SequenceOptions& sequence, const Budget& budget,
    DeviceMemory& memory, Stream& stream, const HostPages& pages) {
  std::unique_ptr<SequenceRecall> recall(
      new SequenceRecall(rank, sequence, budget, memory, stream, pages));
  const RecallBytes bytes = RecallBytesOf(rank, budget, sequence, 0);
  recall->squares_of_all_layers_ = sequence.prompt_in_steps || !recall->prompt_demotes_;
  const int64_t layers = recall->squares_of_all_layers_ ? rank.shape.num_layers : 1;
  HW_ASSIGN_OR_RETURN(
      recall->squares_,
      memory.Allocate(MemoryKind::kSketches, bytes.squares / rank.shape.num_layers * layers));
  HW_ASSIGN_OR_RETURN(recall->channels_, memory.Allocate(MemoryKind::kSketches, bytes.channels));
  for (int layer = 0; layer < rank.shape.num_layers; ++layer) {
    recall->layers_.emplace_back(recall->num_sets_, rank.shape.num_kv_heads);
  }
  recall->views_.resize(rank.shape.num_layers);
  return recall;
}

int64_t SequenceRecall::words_per_set() const {
  return num_pages() * sketch_.page_tokens / kSketchBlock;
}

int64_t SequenceRecall::device_bytes() const {
  int64_t bytes = squares_.bytes() + channels_.bytes();
  for (const DeviceBuffer& page : sketches_) bytes += page.bytes();
  for (const Layer& layer : layers_) bytes += layer.demoted_on_device.bytes();
  return bytes;
}

DeviceSpan<float> SequenceRecall::Squares(int layer) const {
  const int64_t size = int64_t{rank_.shape.num_kv_heads} * kSketchQueries * sketch_.head_dim;
  return squares_.As<float>().Sub(squares_of_all_layers_ ? layer * size : 0, size);
}

DeviceSpan<uint8_t> SequenceRecall::Channels(int layer) const {
  const int64_t size = int64_t{rank_.shape.num_kv_heads} * sketch_.channels;
  return channels_.As<uint8_t>().Sub(layer * size, size);
}

HostPageTable SequenceRecall::HostTable(int layer) const {
  return {.pages = layers_[layer].host_pages, .num_pages = num_pages()};
}

absl::Status SequenceRecall::Observe(int layer, DeviceSpan<const float> queries, int64_t num_tokens,
                                     Position first_position) {
  if (squares_.bytes() == 0) return absl::OkStatus();
  const ObserveQueriesParams params{.queries = queries,
                                    .num_tokens = num_tokens,
                                    .first_position = first_position,
                                    .squares = Squares(layer)};
  return memory_.backend().ObserveQueries(rank_.shape, params, stream_);
}

// Sketch pages and tables for positions below `tokens`.
absl::Status SequenceRecall::AddPages(int64_t tokens) {
  const int64_t before = num_pages();
  const int64_t pages = (tokens + sketch_.page_tokens - 1) / sketch_.page_tokens;
  const int heads = rank_.shape.num_kv_heads;
  const int64_t layer_bytes = heads * sketch_.page_bytes();
  for (int64_t page = before; page < pages; ++page) {
    HW_ASSIGN_OR_RETURN(
        DeviceBuffer buffer,
        memory_.Allocate(MemoryKind::kSketches, rank_.shape.num_layers * layer_bytes));
    for (int layer = 0; layer < rank_.shape.num_layers; ++layer) {
      layers_[layer].sketches.push_back(buffer.As<std::byte>(layer * layer_bytes, layer_bytes));
    }
    sketches_.push_back(std::move(buffer));
  }
  if (pages == before) return absl::OkStatus();
  rest_.Grow(pages);
  const int64_t old_words = before * sketch_.page_tokens / kSketchBlock;
  for (int index = 0; index < rank_.shape.num_layers; ++index) {
    Layer& layer = layers_[index];
    layer.demoted = Restrided(layer.demoted, num_sets_, old_words, words_per_set());
    layer.changed = true;
    layer.ledger.Grow(pages * sketch_.page_tokens);
    // Addresses are good until the sequence is closed: those that are known stay,
    // also when the tier has lost the sequence meanwhile and gives out no more.
    layer.host_pages = Restrided(layer.host_pages, heads, before, pages);
    for (int head = 0; head < heads; ++head) {
      for (int64_t page = before; page < pages; ++page) {
        layer.host_pages[head * pages + page] = host_pages_.Page(index, head, page);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status SequenceRecall::ChooseChannels(int layer, int64_t tokens) {
  const ChooseChannelsParams params{.sketch = sketch_,
                                    .host = HostTable(layer),
                                    .num_positions = tokens,
                                    .squares = Squares(layer),
                                    .num_queries = std::min<int64_t>(tokens, kSketchQueries),
                                    .channels = Channels(layer)};
  return memory_.backend().ChooseChannels(rank_.shape, params, stream_);
}

absl::Status SequenceRecall::EncodeLayer(int layer, int64_t first_page, int64_t tokens) {
  const EncodePagesParams params{.sketch = sketch_,
                                 .host = HostTable(layer),
                                 .channels = Channels(layer),
                                 .pages = layers_[layer].sketches,
                                 .first_page = first_page,
                                 .end_page = num_pages(),
                                 .num_positions = tokens};
  return memory_.backend().EncodePages(rank_.shape, params, stream_);
}

absl::Status SequenceRecall::Upload(int index) {
  Layer& layer = layers_[index];
  if (!layer.changed) return absl::OkStatus();
  const auto bytes = std::as_bytes(std::span(layer.demoted));
  if (layer.demoted_on_device.bytes() != static_cast<int64_t>(bytes.size())) {
    layer.demoted_on_device = DeviceBuffer();
    HW_ASSIGN_OR_RETURN(layer.demoted_on_device,
                        memory_.Allocate(MemoryKind::kSketches, bytes.size()));
  }
  layer.changed = false;
  return memory_.backend().CopyToDevice(layer.demoted_on_device.As<std::byte>(), bytes, stream_);
}

// Positions without a copy are dropped: nothing can read them. A page that rests has one.
void SequenceRecall::MarkDemoted(int index, int set, Position position) {
  Layer& layer = layers_[index];
  const int64_t page = position / sketch_.page_tokens;
  const std::span<const uint8_t> resting = rest_.resting(index);
  for (int head = 0; head < rank_.shape.num_kv_heads; ++head) {
    const int64_t i = head * num_pages() + page;
    if (layer.host_pages[i] == nullptr && resting[i] == 0) return;
  }
  layer.demoted[set * words_per_set() + position / kSketchBlock] |=
      static_cast<uint16_t>(1u << (position % kSketchBlock));
  layer.changed = true;
}

bool SequenceRecall::IsDemoted(const Layer& layer, int set, Position position) const {
  if (position < 0 || position >= num_pages() * sketch_.page_tokens) return false;
  const uint16_t word = layer.demoted[set * words_per_set() + position / kSketchBlock];
  return (word >> (position % kSketchBlock) & 1) != 0;
}

absl::Status SequenceRecall::AddPromptLayer(int index, std::span<const Position> kept,
                                            std::span<const int64_t> scores) {
  const int64_t tokens = options_.prompt_tokens;
  const int64_t kept_per_set = static_cast<int64_t>(kept.size()) / num_sets_;
  if (!prompt_demotes_) return absl::OkStatus();  // else every layer has its sketch
  HW_RETURN_IF_ERROR(AddPages(tokens));
  HW_RETURN_IF_ERROR(ChooseChannels(index, tokens));
  HW_RETURN_IF_ERROR(EncodeLayer(index, 0, tokens));
  Layer& layer = layers_[index];
  for (int set = 0; set < num_sets_; ++set) {
    auto next = kept.begin() + set * kept_per_set;
    const auto end = next + kept_per_set;
    for (Position position = 0; position < tokens; ++position) {
      if (next != end && *next == position) {
        ++next;
        continue;
      }
      MarkDemoted(index, set, position);
      const int64_t score = scores.empty() ? 0 : scores[set * tokens + position];
      layer.ledger.SetScore(set, position, score, clock_);
    }
  }
  HW_RETURN_IF_ERROR(Upload(index));
  if (index + 1 == rank_.shape.num_layers) {
    sketched_tokens_ = tokens;
    squares_ = DeviceBuffer();
  }
  stats_.sketch_bytes = device_bytes();
  return absl::OkStatus();
}

void SequenceRecall::BeginStep(int64_t num_tokens, bool sample_missing, bool note_reads) {
  step_tokens_ = num_tokens;
  step_can_pick_ = sketched() && host_pages_.readable();
  note_reads_ = note_reads;
  reads_.clear();
  if (sketched() && !step_can_pick_) stats_.mass_missing = 1;  // nothing can be read: say so
  if (!step_can_pick_) return;
  if (rests_) UpdateRest();
  ForgetLate();
  sample_missing = sample_missing || steps_++ % kSampleSteps == 0;
  const RecallOptions& recall = options_.policy.recall;
  const int heads = rank_.shape.num_kv_heads;
  const int64_t rows = num_tokens * heads;
  num_picks_.assign(views_.size() * rows, 0);
  const bool any_rests = rest_.num_resting() > 0;
  num_missed_.assign(any_rests ? views_.size() * rows : 0, 0);
  missing_.assign(sample_missing ? views_.size() * rows : 0, 0);
  const int64_t list = note_reads && !recall.all ? recall.recall_tokens : 0;
  picks_.assign(views_.size() * rows * list, 0);
  for (size_t index = 0; index < views_.size(); ++index) {
    Layer& layer = layers_[index];
    RecallView& view = views_[index];
    view = RecallView();
    view.sketch = sketch_;
    view.host = HostTable(static_cast<int>(index));
    view.pages = layer.sketches;
    view.channels = Channels(static_cast<int>(index));
    view.demoted = layer.demoted_on_device.As<uint16_t>();
    view.num_pages = num_pages();
    view.max_picks = recall.recall_tokens;
    view.all = recall.all;
    view.min_share = static_cast<float>(recall.min_share);
    if (any_rests) {
      view.resting = rest_.resting(static_cast<int>(index));
      view.missed = rest_.missed(static_cast<int>(index));
      view.num_missed = std::span(num_missed_).subspan(index * rows, rows);
    }
    view.gains = layer.ledger.fresh_gains();
    view.gains_stride = layer.ledger.stride();
    view.num_picks = std::span(num_picks_).subspan(index * rows, rows);
    view.picks = std::span(picks_).subspan(index * rows * list, rows * list);
    if (sample_missing) view.missing = std::span(missing_).subspan(index * rows, rows);
  }
}

// Asked again for each layer: a sequence may be lost in the middle of a step.
const RecallView* SequenceRecall::View(int layer) const {
  return step_can_pick_ && host_pages_.readable() ? &views_[layer] : nullptr;
}

void SequenceRecall::CommitStep() {
  if (!step_can_pick_) return;
  stats_.queries += static_cast<int64_t>(num_picks_.size());
  for (const int32_t picks : num_picks_) {
    stats_.reads += picks;
    stats_.reads_max = std::max<int64_t>(stats_.reads_max, picks);
  }
  for (const int32_t missed : num_missed_) stats_.missed_picks += missed;
  if (note_reads_) CountReads();
  if (missing_.empty()) return;
  stats_.mass_missing =
      std::accumulate(missing_.begin(), missing_.end(), 0.0) / static_cast<double>(missing_.size());
}

void SequenceRecall::UndoStep() {
  for (Layer& layer : layers_) layer.ledger.ForgetFreshGains();
}

}  // namespace heavywater
