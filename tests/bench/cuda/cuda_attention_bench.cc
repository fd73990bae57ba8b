// `attention --backend cuda`: a decode step's attention beside what the device's
// memory can do.
#include <memory>
#include <span>
#include <vector>

#include "cache_service/base/status.h"
#include "tests/bench/cuda/device.h"
#include "tests/bench/cuda/device_step.h"
#include "tests/bench/decode_case.h"
#include "tests/bench/options.h"
#include "tests/bench/plan_case.h"

namespace heavywater {
namespace {

struct Size {
  int64_t context;
  int batch;
};
constexpr Size kSizes[] = {{8192, 1}, {32768, 1}, {131072, 1}, {4096, 16}};
constexpr Size kQuickSizes[] = {{2048, 1}};
constexpr int64_t kCheckedContext = 777;
constexpr int64_t kPeriod = 8192;  // longer contexts repeat their keys and values

absl::Status Check(Backend& backend) {
  const DecodeInputs inputs = RandomInputs(kCheckedContext);
  const std::unique_ptr<Backend> oracle = CreateReferenceBackend();
  DecodeCase reference(*oracle, inputs.layer, inputs.queries, kCheckedContext - 1);
  DecodeCase checked(backend, inputs.layer, inputs.queries, kCheckedContext - 1);
  return checked.CheckAgainst(reference);
}

absl::StatusOr<BenchJson> MeasureRow(const BenchOptions& options, BenchDevice& device,
                                     const Size& size, double bandwidth) {
  const DecodeInputs inputs = RepeatedInputs(size.context, kPeriod);
  const auto position = static_cast<Position>(size.context - 1);
  {
    DecodeCase decode(device.backend(), inputs.layer, inputs.queries, position);
    HW_RETURN_IF_ERROR(decode.CheckGains());
  }
  const int layers = LayersBeyondCache(size.batch * KvBytes(size.context), device.cache_bytes());
  DeviceStep step(device.backend(), inputs.layer, inputs.queries, position, layers, size.batch);
  const int rounds = options.rounds(size.context);
  const auto attention = [&](bool gains) {
    return device.TimeGraph(rounds,
                            [&](Stream& stream) { return step.EnqueueAttention(stream, gains); });
  };
  HW_ASSIGN_OR_RETURN(const double with_scores, attention(true));
  HW_ASSIGN_OR_RETURN(const double without, attention(false));
  HW_ASSIGN_OR_RETURN(const double plan, device.TimeGraph(rounds, [&](Stream& stream) {
    return step.EnqueuePlan(stream);
  }));
  const double read_floor = static_cast<double>(step.kv_bytes()) / bandwidth;
  return BenchJson{{"context", size.context},
                   {"target", "cuda"},
                   {"bandwidth_ratio", read_floor / with_scores},
                   {"roofline_ratio", nullptr},
                   {"score_overhead", with_scores / without - 1},
                   {"policy_overhead", plan / with_scores},
                   {"batch", size.batch},
                   {"layer_us", with_scores / layers * 1e6}};
}

}  // namespace

absl::StatusOr<BenchJson> RunCudaAttentionBench(const BenchOptions& options) {
  HW_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> device, BenchDevice::Create());
  HW_RETURN_IF_ERROR(Check(device->backend()));
  HW_ASSIGN_OR_RETURN(const double bandwidth, device->MeasureRead());
  HW_ASSIGN_OR_RETURN(const double copy, device->MeasureCopy());
  std::span<const Size> sizes = kSizes;
  if (options.quick) sizes = kQuickSizes;
  BenchJson rows = BenchJson::array();
  for (const Size& size : sizes) {
    HW_ASSIGN_OR_RETURN(BenchJson row, MeasureRow(options, *device, size, bandwidth));
    rows.push_back(std::move(row));
  }
  return BenchJson{{"device", device->name()},
                   {"bandwidth_gb_s", bandwidth / 1e9},
                   {"copy_gb_s", copy / 1e9},
                   {"fma_gflops", nullptr},
                   {"rows", std::move(rows)}};
}

}  // namespace heavywater
