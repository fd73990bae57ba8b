// `attention`: one decode step's attention beside what the machine can read and
// compute, and what scores and the policy step cost beside it.
#include <algorithm>
#include <memory>
#include <vector>

#include "cache_service/base/status.h"
#include "tests/bench/decode_case.h"
#include "tests/bench/machine.h"
#include "tests/bench/options.h"
#include "tests/bench/plan_case.h"

namespace heavywater {
namespace {

constexpr int64_t kContexts[] = {2048, 8192, 32768};
constexpr int64_t kQuickContexts[] = {512};
constexpr int64_t kCheckedContext = 777;

// One instruction set, and the machine's limits with it.
struct Target {
  const char* name = nullptr;
  std::unique_ptr<Backend> backend;
  std::unique_ptr<MemoryReader> reader;
  double operations_per_s = 0;
};

Target MakeTarget(const char* name) {
  Target target{.name = name, .backend = BenchBackend(name), .reader = nullptr};
  if (target.backend == nullptr) return target;
  const CpuTarget cpu = ChooseCpuTarget(name).value();
  target.reader = std::make_unique<MemoryReader>(cpu);
  target.operations_per_s = MeasureMultiplyAdd(cpu);
  return target;
}

absl::Status CheckTarget(Target& target) {
  const DecodeInputs inputs = RandomInputs(kCheckedContext);
  const std::unique_ptr<Backend> oracle = CreateReferenceBackend();
  DecodeCase reference(*oracle, inputs.layer, inputs.queries, kCheckedContext - 1);
  DecodeCase checked(*target.backend, inputs.layer, inputs.queries, kCheckedContext - 1);
  return checked.CheckAgainst(reference);
}

struct Measured {
  BenchJson row;
  double bandwidth = 0;
};

absl::StatusOr<Measured> MeasureRow(const BenchOptions& options, Target& target,
                                    const DecodeInputs& inputs, int64_t context) {
  Measured measured{.row = {{"context", context},
                            {"target", target.name},
                            {"bandwidth_ratio", nullptr},
                            {"roofline_ratio", nullptr},
                            {"score_overhead", nullptr},
                            {"policy_overhead", nullptr}}};
  if (target.backend == nullptr) return measured;
  DecodeCase decode(*target.backend, inputs.layer, inputs.queries,
                    static_cast<Position>(context - 1));
  HW_RETURN_IF_ERROR(decode.CheckGains());
  PlanCase plan(*target.backend, inputs.layer);
  HW_RETURN_IF_ERROR(plan.Check());
  // A pass before either kind of step: scratch has left the core's caches in both.
  const Timed timed[] = {target.reader->Pass(), decode.Step(), target.reader->Pass(),
                         decode.Step(false), plan.Step()};
  const std::vector<double> seconds = MedianSeconds(options.rounds(context), timed);
  measured.bandwidth = static_cast<double>(target.reader->bytes()) / seconds[0];
  const double read_floor = static_cast<double>(KvBytes(context)) / measured.bandwidth;
  const double compute_floor = AttentionOperations(context) / target.operations_per_s;
  measured.row["bandwidth_ratio"] = read_floor / seconds[1];
  measured.row["roofline_ratio"] = std::max(read_floor, compute_floor) / seconds[1];
  measured.row["score_overhead"] = seconds[1] / seconds[3] - 1;
  measured.row["policy_overhead"] = seconds[4] / seconds[1];
  return measured;
}

}  // namespace

absl::StatusOr<BenchJson> RunAttentionBench(const BenchOptions& options) {
  std::vector<Target> targets;
  double operations_per_s = 0;
  for (const char* name : kBenchTargets) {
    Target& target = targets.emplace_back(MakeTarget(name));
    if (target.backend != nullptr) HW_RETURN_IF_ERROR(CheckTarget(target));
    operations_per_s = std::max(operations_per_s, target.operations_per_s);
  }
  std::span<const int64_t> contexts = kContexts;
  if (options.quick) contexts = kQuickContexts;
  double bandwidth = 0;
  BenchJson rows = BenchJson::array();
  for (const int64_t context : contexts) {
    const DecodeInputs inputs = RandomInputs(context);
    for (Target& target : targets) {
      HW_ASSIGN_OR_RETURN(Measured measured, MeasureRow(options, target, inputs, context));
      bandwidth = std::max(bandwidth, measured.bandwidth);
      rows.push_back(std::move(measured.row));
    }
  }
  return BenchJson{{"bandwidth_gb_s", bandwidth / 1e9},
                   {"fma_gflops", operations_per_s / 1e9},
                   {"rows", std::move(rows)}};
}

}  // namespace heavywater
