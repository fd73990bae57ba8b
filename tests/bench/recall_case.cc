#include "tests/bench/recall_case.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "worker/policy/policy.h"
#include "worker/rank/recall_memory.h"

namespace heavywater {
namespace {

constexpr int64_t kContexts[] = {8192, 32768};
constexpr int64_t kQuickContexts[] = {1024};
constexpr int64_t kCheckedContext = 1000;

// Sinks, recent and positions spread evenly between them: as many as the preset
// `recall` has slots for, and the new tokens of an interval.
absl::StatusOr<std::vector<Position>> ResidentPositions(int64_t context) {
  HW_ASSIGN_OR_RETURN(PolicyOptions policy, Preset("recall"));
  policy.min_budget_tokens = 1;
  HW_ASSIGN_OR_RETURN(
      const Budget budget,
      ResolveSequenceBudget(BenchShape(),
                            {.policy = policy, .prompt_tokens = context, .max_tokens = context}));
  const int64_t slots = budget.budget_tokens + policy.plan_interval_steps;
  const int64_t between = context - budget.sink_tokens - budget.recent_tokens;
  const int64_t heavy = slots - budget.sink_tokens - budget.recent_tokens;
  std::vector<Position> positions;
  for (int64_t i = 0; i < budget.sink_tokens; ++i) positions.push_back(static_cast<Position>(i));
  for (int64_t i = 0; i < heavy; ++i) {
    positions.push_back(static_cast<Position>(budget.sink_tokens + i * between / heavy));
  }
  for (int64_t i = context - budget.recent_tokens; i < context; ++i) {
    positions.push_back(static_cast<Position>(i));
  }
  return positions;
}

LayerImage SlotsOf(const LayerImage& full, const std::vector<Position>& positions) {
  const KvShape shape = BenchShape();
  LayerImage layer = EmptyLayer(shape, 1, static_cast<int64_t>(positions.size()));
  layer.positions = positions;
  auto key = layer.keys.begin();
  auto value = layer.values.begin();
  for (int kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
    for (const Position position : positions) {
      key =
          std::ranges::copy(StoredRow(full.keys, shape, full.capacity, kv_head, position), key).out;
      value =
          std::ranges::copy(StoredRow(full.values, shape, full.capacity, kv_head, position), value)
              .out;
    }
  }
  return layer;
}

}  // namespace

absl::StatusOr<RecallInputs> MakeRecallInputs(int64_t context) {
  HW_ASSIGN_OR_RETURN(const std::vector<Position> positions, ResidentPositions(context));
  RecallInputs inputs{.full = RandomInputs(context),
                      .resident = {},
                      .recall = {},
                      .position = static_cast<Position>(context - 1)};
  const KvShape shape = BenchShape();
  inputs.resident = SlotsOf(inputs.full.layer, positions);
  inputs.recall = RecallOf(shape, inputs.full.layer, DefaultSketchChannels(shape.head_dim));
  for (Position i = 0; i < context; ++i) SetDemoted(inputs.recall, 0, i, true);
  for (const Position position : positions) SetDemoted(inputs.recall, 0, position, false);
  return inputs;
}

std::span<const int64_t> RecallContexts(bool quick) {
  if (quick) return kQuickContexts;
  return kContexts;
}

absl::Status CheckRecall(Backend& backend) {
  HW_ASSIGN_OR_RETURN(const RecallInputs inputs, MakeRecallInputs(kCheckedContext));
  const std::unique_ptr<Backend> oracle = CreateReferenceBackend();
  RecallCase reference(*oracle, inputs, inputs.recall.min_share);
  RecallCase checked(backend, inputs, inputs.recall.min_share);
  HW_RETURN_IF_ERROR(checked.decode.CheckAgainst(reference.decode));
  return CheckPicks(inputs, checked, 1);
}

absl::Status CheckPicks(const RecallInputs& inputs, const RecallCase& step, int64_t least) {
  for (const std::vector<Position>& picks : step.recall.Read().picks) {
    const auto count = static_cast<int64_t>(picks.size());
    if (count < least || count > inputs.recall.max_picks) {
      return absl::InternalError(absl::StrCat("a KV head picked ", count, ", want ", least, " to ",
                                              inputs.recall.max_picks));
    }
    for (const Position pick : picks) {
      if (IsDemoted(inputs.recall, 0, pick)) continue;
      return absl::InternalError(absl::StrCat("picked position ", pick, ", which has a slot"));
    }
  }
  return absl::OkStatus();
}

}  // namespace heavywater
