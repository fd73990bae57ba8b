// `recall --backend cuda`: a step with recall at 20 % of the full cache's bytes beside
// the full cache's attention, on a GPU whose picks come over the bus.
#include <memory>
#include <span>
#include <vector>

#include "cache_service/base/status.h"
#include "tests/bench/cuda/device.h"
#include "tests/bench/cuda/device_step.h"
#include "tests/bench/decode_case.h"
#include "tests/bench/options.h"
#include "tests/bench/recall_case.h"

namespace heavywater {
namespace {

// Every layer's own sketches and host pages. Nothing is reported to the host: a
// captured step could not.
class LayerRecalls {
 public:
  LayerRecalls(Backend& backend, const RecallInputs& inputs, int num_layers) {
    for (int i = 0; i < num_layers; ++i) {
      recalls_.push_back(std::make_unique<DeviceRecall>(backend, BenchShape(), inputs.recall, 1));
      RecallView& view = recalls_.back()->view();
      view.gains = {};
      view.num_picks = {};
      view.picks = {};
      view.missing = {};
    }
  }
  std::vector<const RecallView*> Views(float min_share) {
    std::vector<const RecallView*> views;
    for (auto& recall : recalls_) {
      recall->view().min_share = min_share;
      views.push_back(&recall->view());
    }
    return views;
  }

 private:
  std::vector<std::unique_ptr<DeviceRecall>> recalls_;
};

// Seconds of a layer.
absl::StatusOr<double> TimeLayer(BenchDevice& device, int rounds, DeviceStep& step) {
  HW_ASSIGN_OR_RETURN(const double seconds, device.TimeGraph(rounds, [&](Stream& stream) {
    return step.EnqueueAttention(stream);
  }));
  return seconds / step.num_layers();
}

absl::StatusOr<BenchJson> MeasureRow(const BenchOptions& options, BenchDevice& device,
                                     int64_t context, double bandwidth) {
  HW_ASSIGN_OR_RETURN(const RecallInputs inputs, MakeRecallInputs(context));
  Backend& backend = device.backend();
  const int rounds = options.rounds(context);
  const auto resident = static_cast<int64_t>(inputs.resident.positions.size());
  const int layers = LayersBeyondCache(KvBytes(resident), device.cache_bytes());
  const std::vector<float>& queries = inputs.full.queries;
  DeviceStep full(backend, inputs.full.layer, queries, inputs.position, layers, 1);
  HW_ASSIGN_OR_RETURN(const double full_s, TimeLayer(device, rounds, full));
  DeviceStep slots(backend, inputs.resident, queries, inputs.position, layers, 1);
  HW_ASSIGN_OR_RETURN(const double slots_s, TimeLayer(device, rounds, slots));
  LayerRecalls recalls(backend, inputs, layers);
  DeviceStep scan(backend, inputs.resident, queries, inputs.position, layers, 1,
                  recalls.Views(kNothingPasses));
  HW_ASSIGN_OR_RETURN(const double scan_s, TimeLayer(device, rounds, scan));
  DeviceStep step(backend, inputs.resident, queries, inputs.position, layers, 1,
                  recalls.Views(inputs.recall.min_share));
  HW_ASSIGN_OR_RETURN(const double step_s, TimeLayer(device, rounds, step));
  return BenchJson{
      {"context", context},
      {"target", "cuda"},
      {"full_bandwidth_ratio", static_cast<double>(KvBytes(context)) / bandwidth / full_s},
      {"scan_vs_full", (scan_s - slots_s) / full_s},
      {"step_vs_full", step_s / full_s},
      {"layer_us", step_s * 1e6}};
}

}  // namespace

absl::StatusOr<BenchJson> RunCudaRecallBench(const BenchOptions& options) {
  HW_ASSIGN_OR_RETURN(const std::unique_ptr<BenchDevice> device, BenchDevice::Create());
  HW_RETURN_IF_ERROR(CheckRecall(device->backend()));
  HW_ASSIGN_OR_RETURN(const double bandwidth, device->MeasureRead());
  const std::span<const int64_t> contexts = RecallContexts(options.quick);
  BenchJson rows = BenchJson::array();
  for (const int64_t context : contexts) {
    HW_ASSIGN_OR_RETURN(BenchJson row, MeasureRow(options, *device, context, bandwidth));
    rows.push_back(std::move(row));
  }
  return BenchJson{
      {"device", device->name()}, {"bandwidth_gb_s", bandwidth / 1e9}, {"rows", std::move(rows)}};
}

}  // namespace heavywater
