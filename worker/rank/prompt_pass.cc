#include "worker/rank/prompt_pass.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "worker/cache/device_bytes.h"
#include "worker/rank/group_sum.h"
#include "worker/rank/sequence_cache.h"
#include "worker/rank/sequence_memory.h"
#include "worker/rank/workspace.h"

namespace heavywater {

absl::StatusOr<std::unique_ptr<PromptPass>> PromptPass::Create(RankCache& cache, Model& model,
                                                               SequenceId sequence,
                                                               std::vector<int32_t> tokens) {
  HW_CHECK(model.hidden_size() == cache.options().hidden_size);
  HW_CHECK(model.vocab_size() == cache.options().vocab_size);
  HW_ASSIGN_OR_RETURN(SequenceCache * found, cache.Find(sequence));
  const int64_t want = found->options().prompt_tokens;
  if (static_cast<int64_t>(tokens.size()) != want) {
    return absl::InvalidArgumentError(absl::StrCat("prompt of sequence ", sequence, " has ",
                                                   tokens.size(), " tokens, want ", want,
                                                   " as opened"));
  }
  std::unique_ptr<PromptPass> pass(new PromptPass(cache, model, std::move(tokens)));
  HW_RETURN_IF_ERROR(pass->Allocate(sequence));
  return pass;
}

PromptPass::~PromptPass() = default;

absl::Status PromptPass::Allocate(SequenceId sequence) {
  HW_ASSIGN_OR_RETURN(const SequenceCache* opened, cache_.Find(sequence));
  stored_tokens_ = chunk_begin_ = opened->options().stored_tokens;
  HW_ASSIGN_OR_RETURN(hidden_,
                      cache_.mutable_memory().Allocate(
                          MemoryKind::kPromptHidden,
                          PromptHiddenBytes(num_tokens() - stored_tokens_, model_.hidden_size())));
  HW_ASSIGN_OR_RETURN(attention_, PromptAttention::Create(cache_, sequence));
  return absl::OkStatus();
}

DeviceSpan<float> PromptPass::Hidden(int64_t first, int64_t count) const {
  const int64_t row = first - stored_tokens_;
  return hidden_.As<float>(row * model_.hidden_size() * static_cast<int64_t>(sizeof(float)),
                           count * model_.hidden_size());
}

absl::Status PromptPass::RunChunk() {
  HW_CHECK(!done() && !layer_complete());
  const int64_t count =
      std::min<int64_t>(cache_.options().max_step_tokens, num_tokens() - chunk_begin_);
  const Position first = static_cast<Position>(chunk_begin_);
  if (chunk_begin_ == stored_tokens_) attention_->LoadStored(layer());
  if (layer() == 0) HW_RETURN_IF_ERROR(Embed(first, count));
  HW_RETURN_IF_ERROR(ChunkThroughLayer(first, count));
  chunk_begin_ += count;
  return layer_complete() ? attention_->BeforeReduce() : absl::OkStatus();
}

absl::Status PromptPass::Embed(Position first, int64_t count) {
  return model_.Embed(std::span(tokens_).subspan(first, count), Hidden(first, count),
                      cache_.stream());
}

absl::Status PromptPass::ChunkThroughLayer(Position first, int64_t count) {
  Workspace& workspace = cache_.workspace();
  std::vector<Position> positions(count);
  // At place 0 nothing turns: attention turns what goes by places in the cache.
  if (!attention_->turns_rows()) std::iota(positions.begin(), positions.end(), first);
  HW_RETURN_IF_ERROR(model_.ComputeQkv(layer(), Hidden(first, count), positions,
                                       workspace.queries(count), workspace.keys(count),
                                       workspace.values(count), cache_.stream()));
  attention_->AppendAndAttend(layer(), first, count, workspace.rows(count));
  // A rank that has failed goes on with the model's collectives, so that its
  // peers reach the reduce where it tells them.
  return model_.FinishLayer(layer(), workspace.attention(count), Hidden(first, count),
                            cache_.stream());
}

absl::Status PromptPass::RunLayerTogether(std::span<PromptPass* const> passes) {
  HW_CHECK(!passes.empty());
  RankCache& cache = passes[0]->cache_;
  const int layer = passes[0]->layer();
  int64_t total = 0;
  std::vector<Position> positions;
  for (const PromptPass* pass : passes) {
    HW_CHECK(!pass->done() && pass->layer() == layer && pass->chunk_begin_ == 0);
    HW_CHECK(pass->stored_tokens_ == 0);
    // As in ChunkThroughLayer().
    const bool turns = pass->attention_->turns_rows();
    for (Position i = 0; i < pass->num_tokens(); ++i) positions.push_back(turns ? 0 : i);
    total += pass->num_tokens();
  }
  Workspace& workspace = cache.workspace();
  const DeviceSpan<float> hidden = workspace.hidden(total);
  HW_RETURN_IF_ERROR(EmbedTogether(passes, hidden));
  Model& model = passes[0]->model_;
  HW_RETURN_IF_ERROR(model.ComputeQkv(layer, hidden, positions, workspace.queries(total),
                                      workspace.keys(total), workspace.values(total),
                                      cache.stream()));
  AttendTogether(passes, total);
  HW_RETURN_IF_ERROR(model.FinishLayer(layer, workspace.attention(total), hidden, cache.stream()));
  int64_t row = 0;
  for (PromptPass* pass : passes) {
    const int64_t count = pass->num_tokens() * model.hidden_size();
    HW_RETURN_IF_ERROR(
        cache.backend().CopyOnDevice(DeviceBytes(pass->Hidden(0, pass->num_tokens())),
                                     DeviceBytes(hidden.Sub(row, count)), cache.stream()));
    row += count;
    pass->chunk_begin_ = pass->num_tokens();
    HW_RETURN_IF_ERROR(pass->attention_->BeforeReduce());
  }
  return absl::OkStatus();
}

// The first layer's rows are the embeddings of all tokens, later ones' what each pass keeps.
absl::Status PromptPass::EmbedTogether(std::span<PromptPass* const> passes,
                                       DeviceSpan<float> hidden) {
  RankCache& cache = passes[0]->cache_;
  Model& model = passes[0]->model_;
  if (passes[0]->layer() == 0) {
    std::vector<int32_t> tokens;
    for (const PromptPass* pass : passes) {
      tokens.insert(tokens.end(), pass->tokens_.begin(), pass->tokens_.end());
    }
    return model.Embed(tokens, hidden, cache.stream());
  }
  int64_t row = 0;
  for (const PromptPass* pass : passes) {
    const int64_t count = pass->num_tokens() * model.hidden_size();
    HW_RETURN_IF_ERROR(cache.backend().CopyOnDevice(
        DeviceBytes(hidden.Sub(row, count)), DeviceBytes(pass->Hidden(0, pass->num_tokens())),
        cache.stream()));
    row += count;
  }
  return absl::OkStatus();
}

void PromptPass::AttendTogether(std::span<PromptPass* const> passes, int64_t total) {
  RankCache& cache = passes[0]->cache_;
  const AttentionRows rows = cache.workspace().rows(total);
  int64_t first = 0;
  for (PromptPass* pass : passes) {
    pass->attention_->AppendAndAttend(pass->layer(), 0, pass->num_tokens(),
                                      rows.Sub(cache.options().shape, first, pass->num_tokens()));
    first += pass->num_tokens();
  }
}

absl::Status PromptPass::LayerBefore() {
  while (!layer_complete()) HW_RETURN_IF_ERROR(RunChunk());
  return absl::OkStatus();
}

DeviceSpan<int64_t> PromptPass::reduce_buffer() {
  HW_CHECK(!done() && layer_complete());
  return attention_->reduce_buffer();
}

absl::Status PromptPass::LayerAfter() {
  HW_CHECK(!done() && layer_complete());
  HW_RETURN_IF_ERROR(attention_->AfterReduce());
  chunk_begin_ = stored_tokens_;
  return absl::OkStatus();
}

absl::StatusOr<DeviceSpan<const float>> PromptPass::ComputeLogits() {
  HW_CHECK(done());
  HW_ASSIGN_OR_RETURN(const DeviceSpan<float> logits, cache_.workspace().Logits(1));
  HW_RETURN_IF_ERROR(model_.ComputeLogits(Hidden(num_tokens() - 1, 1), logits, cache_.stream()));
  HW_RETURN_IF_ERROR(attention_->status());
  return DeviceSpan<const float>(logits);
}

absl::StatusOr<DeviceSpan<const float>> PromptPass::Run(Communicator& communicator) {
  while (!done()) {
    HW_RETURN_IF_ERROR(LayerBefore());
    HW_RETURN_IF_ERROR(SumInPlace(reduce_buffer(), communicator, cache_.stream()));
    HW_RETURN_IF_ERROR(LayerAfter());
  }
  HW_ASSIGN_OR_RETURN(const DeviceSpan<const float> logits, ComputeLogits());
  HW_RETURN_IF_ERROR(communicator.Settle(cache_.stream()));
  return logits;
}

}  // namespace heavywater
