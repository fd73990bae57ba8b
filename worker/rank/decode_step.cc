#include "worker/rank/decode_step.h"

#include <set>

#include "absl/strings/str_cat.h"
#include "cache_service/base/check.h"
#include "cache_service/base/status.h"
#include "cache_service/base/step_phases.h"
#include "worker/cache/device_bytes.h"
#include "worker/rank/group_sum.h"
#include "worker/rank/workspace.h"

namespace heavywater {

DecodeStep::DecodeStep(RankCache& cache, Model& model)
    : cache_(cache), model_(model), attention_(cache) {
  HW_CHECK(model.hidden_size() == cache.options().hidden_size);
  HW_CHECK(model.vocab_size() == cache.options().vocab_size);
}

absl::Status DecodeStep::Run(const StepDescriptor& descriptor, Communicator& communicator) {
  HW_RETURN_IF_ERROR(Before(descriptor));
  const absl::Status reduced = SumInPlace(reduce_buffer(), communicator, cache_.stream());
  if (!reduced.ok()) {
    attention_.UndoAll(reduced);
    return reduced;
  }
  HW_RETURN_IF_ERROR(After());
  const StepPhaseScope phase(StepPhase::kReduce);
  return communicator.Settle(cache_.stream());  // the logits' gather
}

// Steps 1 to 3 of each layer, then this rank's part of what is reduced (4).
absl::Status DecodeStep::Before(const StepDescriptor& descriptor) {
  HW_RETURN_IF_ERROR(Check(descriptor));
  Begin(descriptor);
  absl::Status status = RunLayers();
  if (status.ok()) status = attention_.BeforeReduce();
  if (!status.ok()) attention_.UndoAll(status);
  return status;
}

// Step 5: agree, then plan.
absl::Status DecodeStep::After() {
  HW_RETURN_IF_ERROR(attention_.AfterReduce());
  return ComputeLogits();
}

// What every rank sees alike, since it only depends on the descriptor and
// options that all have in common.
absl::Status DecodeStep::Check(const StepDescriptor& descriptor) const {
  int64_t tokens = 0;
  std::set<SequenceId> seen;
  for (const StepItem& item : descriptor.items) {
    if (item.num_tokens < 1) {
      return absl::InvalidArgumentError(absl::StrCat("num_tokens of sequence ", item.sequence,
                                                     " is ", item.num_tokens, ", want at least 1"));
    }
    if (!seen.insert(item.sequence).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("sequence ", item.sequence, " is twice in step ", descriptor.step));
    }
    tokens += item.num_tokens;
  }
  if (tokens == 0 || tokens > cache_.options().max_step_tokens) {
    return absl::InvalidArgumentError(absl::StrCat("step ", descriptor.step, " has ", tokens,
                                                   " tokens, want 1 to ",
                                                   cache_.options().max_step_tokens));
  }
  if (tokens != static_cast<int64_t>(descriptor.tokens.size())) {
    return absl::InvalidArgumentError(absl::StrCat("step ", descriptor.step, " brings ",
                                                   descriptor.tokens.size(), " tokens, want ",
                                                   tokens, " for its items"));
  }
  return absl::OkStatus();
}

void DecodeStep::Begin(const StepDescriptor& descriptor) {
  descriptor_ = descriptor;
  logits_ = DeviceSpan<const float>();
  std::vector<int64_t> first_rows;
  int64_t rows = 0;
  for (const StepItem& item : descriptor.items) {
    first_rows.push_back(rows);
    rows += item.num_tokens;
  }
  attention_.Begin(descriptor.step, descriptor.items, first_rows, num_tokens());
  positions_.clear();
  for (const ActiveItem& item : attention_.items()) {
    // At place 0 nothing turns: attention turns what goes by places in the cache.
    const bool placed = item.sequence != nullptr && item.sequence->places() != nullptr;
    for (int64_t i = 0; i < item.spec.num_tokens; ++i) {
      positions_.push_back(placed ? 0 : item.spec.first_position + static_cast<Position>(i));
    }
  }
}

absl::Status DecodeStep::RunLayers() {
  HW_RETURN_IF_ERROR(
      model_.Embed(descriptor_.tokens, cache_.workspace().hidden(num_tokens()), cache_.stream()));
  for (int layer = 0; layer < cache_.options().shape.num_layers; ++layer) {
    HW_RETURN_IF_ERROR(RunLayer(layer));
  }
  return absl::OkStatus();
}

absl::Status DecodeStep::RunLayer(int layer) {
  const int64_t rows = num_tokens();
  Workspace& workspace = cache_.workspace();
  HW_RETURN_IF_ERROR(model_.ComputeQkv(layer, workspace.hidden(rows), positions_,
                                       workspace.queries(rows), workspace.keys(rows),
                                       workspace.values(rows), cache_.stream()));
  HW_RETURN_IF_ERROR(attention_.AppendAndAttend(layer, workspace.rows(rows)));
  return model_.FinishLayer(layer, workspace.attention(rows), workspace.hidden(rows),
                            cache_.stream());
}

absl::Status DecodeStep::ComputeLogits() {
  int64_t rows = 0;
  const std::span<ActiveItem> items = attention_.items();
  for (size_t i = 0; i < items.size(); ++i) {
    if (!item_status()[i].ok()) continue;
    items[i].first_logits_row = rows;
    rows += items[i].logits_rows();
  }
  if (rows == 0) return absl::OkStatus();
  const DeviceSpan<float> hidden = cache_.workspace().last_hidden(rows);
  HW_RETURN_IF_ERROR(GatherLastHidden(hidden));
  HW_ASSIGN_OR_RETURN(const DeviceSpan<float> logits, cache_.workspace().Logits(rows));
  logits_ = logits;
  return model_.ComputeLogits(hidden, logits, cache_.stream());
}

absl::Status DecodeStep::GatherLastHidden(DeviceSpan<float> to) {
  const int64_t width = model_.hidden_size();
  const DeviceSpan<float> from = cache_.workspace().hidden(num_tokens());
  const std::span<const ActiveItem> items = attention_.items();
  for (size_t i = 0; i < items.size(); ++i) {
    if (!item_status()[i].ok()) continue;
    const ActiveItem& item = items[i];
    const int64_t rows = item.logits_rows();
    const int64_t first = item.first_row + item.spec.num_tokens - rows;
    HW_RETURN_IF_ERROR(cache_.backend().CopyOnDevice(
        DeviceBytes(to.Sub(item.first_logits_row * width, rows * width)),
        DeviceBytes(from.Sub(first * width, rows * width)), cache_.stream()));
  }
  return absl::OkStatus();
}

DeviceSpan<const float> DecodeStep::logits(int item) const {
  HW_CHECK(item_status()[item].ok() && !logits_.empty());
  const int64_t width = model_.vocab_size();
  const ActiveItem& active = attention_.items()[item];
  return logits_.Sub(active.first_logits_row * width, active.logits_rows() * width);
}

}  // namespace heavywater
