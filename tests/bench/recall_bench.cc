// `recall`: a step with recall at 20 % of the full cache's bytes beside the full
// cache's attention, and the scan's share of it.
#include <algorithm>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "cache_service/base/status.h"
#include "tests/bench/decode_case.h"
#include "tests/bench/machine.h"
#include "tests/bench/options.h"
#include "worker/policy/policy.h"
#include "worker/rank/recall_memory.h"

namespace heavywater {
namespace {

constexpr int64_t kContexts[] = {8192, 32768};
constexpr int64_t kQuickContexts[] = {1024};
constexpr int64_t kCheckedContext = 1000;
// Above any estimate: the scan runs, nothing is picked.
constexpr float kNothingPasses = 1e30f;

// What stays of a full layer, and all of it as host pages.
struct RecallInputs {
  DecodeInputs full;
  LayerImage resident;
  RecallImage recall;
  Position position = 0;  // of the query: the last
};

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

absl::StatusOr<RecallInputs> MakeInputs(int64_t context) {
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

// A step with recall on one backend; what only a debugger reads is not asked for.
struct RecallCase {
  RecallCase(Backend& backend, const RecallInputs& inputs, float min_share)
      : recall(backend, BenchShape(), inputs.recall, 1),
        decode(backend, inputs.resident, inputs.full.queries, inputs.position, &recall) {
    recall.view().min_share = min_share;
    recall.view().missing = {};
  }

  DeviceRecall recall;
  DecodeCase decode;
};

// INTERNAL unless each KV head picked between `least` and max_picks demoted positions.
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

absl::Status CheckTarget(Backend& backend) {
  HW_ASSIGN_OR_RETURN(const RecallInputs inputs, MakeInputs(kCheckedContext));
  const std::unique_ptr<Backend> oracle = CreateReferenceBackend();
  RecallCase reference(*oracle, inputs, inputs.recall.min_share);
  RecallCase checked(backend, inputs, inputs.recall.min_share);
  HW_RETURN_IF_ERROR(checked.decode.CheckAgainst(reference.decode));
  return CheckPicks(inputs, checked, 1);
}

absl::StatusOr<BenchJson> MeasureRow(const BenchOptions& options, const char* target,
                                     Backend* backend, const RecallInputs& inputs,
                                     int64_t context) {
  BenchJson row = {{"context", context},
                   {"target", target},
                   {"full_bandwidth_ratio", nullptr},
                   {"scan_vs_full", nullptr},
                   {"step_vs_full", nullptr}};
  if (backend == nullptr) return row;
  MemoryReader reader(ChooseCpuTarget(target).value());
  DecodeCase full(*backend, inputs.full.layer, inputs.full.queries, inputs.position);
  DecodeCase resident(*backend, inputs.resident, inputs.full.queries, inputs.position);
  RecallCase scan(*backend, inputs, kNothingPasses);
  RecallCase step(*backend, inputs, inputs.recall.min_share);
  for (DecodeCase* decode : {&full, &resident, &scan.decode, &step.decode}) {
    HW_RETURN_IF_ERROR(decode->CheckGains());
  }
  HW_RETURN_IF_ERROR(CheckPicks(inputs, step, 1));
  const Timed timed[] = {reader.Pass(), full.Step(), resident.Step(), scan.decode.Step(),
                         step.decode.Step()};
  const std::vector<double> seconds = MedianSeconds(options.rounds(context), timed);
  const double bandwidth = static_cast<double>(reader.bytes()) / seconds[0];
  row["full_bandwidth_ratio"] = static_cast<double>(KvBytes(context)) / bandwidth / seconds[1];
  row["scan_vs_full"] = (seconds[3] - seconds[2]) / seconds[1];
  row["step_vs_full"] = seconds[4] / seconds[1];
  return row;
}

}  // namespace

absl::StatusOr<BenchJson> RunRecallBench(const BenchOptions& options) {
  for (const char* target : kBenchTargets) {
    const std::unique_ptr<Backend> backend = BenchBackend(target);
    if (backend != nullptr) HW_RETURN_IF_ERROR(CheckTarget(*backend));
  }
  std::span<const int64_t> contexts = kContexts;
  if (options.quick) contexts = kQuickContexts;
  BenchJson rows = BenchJson::array();
  for (const int64_t context : contexts) {
    HW_ASSIGN_OR_RETURN(const RecallInputs inputs, MakeInputs(context));
    for (const char* target : kBenchTargets) {
      const std::unique_ptr<Backend> backend = BenchBackend(target);
      HW_ASSIGN_OR_RETURN(BenchJson row,
                          MeasureRow(options, target, backend.get(), inputs, context));
      rows.push_back(std::move(row));
    }
  }
  return BenchJson{{"rows", std::move(rows)}};
}

}  // namespace heavywater
