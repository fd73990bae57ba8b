// `recall`: a step with recall at 20 % of the full cache's bytes beside the full
// cache's attention, and the scan's share of it.
#include <algorithm>
#include <memory>
#include <vector>

#include "cache_service/base/status.h"
#include "tests/bench/decode_case.h"
#include "tests/bench/machine.h"
#include "tests/bench/options.h"
#include "tests/bench/recall_case.h"

namespace heavywater {
namespace {

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
    if (backend != nullptr) HW_RETURN_IF_ERROR(CheckRecall(*backend));
  }
  const std::span<const int64_t> contexts = RecallContexts(options.quick);
  BenchJson rows = BenchJson::array();
  for (const int64_t context : contexts) {
    HW_ASSIGN_OR_RETURN(const RecallInputs inputs, MakeRecallInputs(context));
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
